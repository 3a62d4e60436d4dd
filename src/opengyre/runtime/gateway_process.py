"""The gateway's process: wires the HTTP gateway, the recorder and the engine links together.

Must not know: roles, steps, groups. Invariant: a turn is told to the controller only after its
bytes are synced.
"""
