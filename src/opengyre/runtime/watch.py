"""Shows a run while it goes on, and its result when it is over.

Owns: filling the views' state from the scheduler and the shell's counters. Must not know: how a
terminal is drawn.
"""
