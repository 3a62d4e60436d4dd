"""Names of the things the control plane counts. Ids are counters, never random.

Owns: the NewTypes and their spelling. Must not know: where any of these things live.
"""

from typing import NewType

ExecutionId = NewType("ExecutionId", str)
GroupId = NewType("GroupId", str)
EngineId = NewType("EngineId", str)
CommandId = NewType("CommandId", int)


def execution_id(number: int) -> ExecutionId:
    return ExecutionId(f"e{number:06d}")


def group_id(number: int) -> GroupId:
    return GroupId(f"g{number:05d}")


def cell_engine_id(cell: int) -> EngineId:
    """The rollout engine inside cell `cell`."""
    return EngineId(f"c{cell}")


def standalone_engine_id(number: int) -> EngineId:
    return EngineId(f"s{number}")
