"""The one error of the control plane: a rule of our own was broken.

Owns: InvariantError. Must not know: who catches it, or what is logged when it ends the run.
"""


class InvariantError(Exception):
    """Our fault: a state that the rules forbid. It is never caught to go on; the run crashes."""
