"""What the roles of each cell hold, and what each change of role freed: rows for tables.

Owns: which readings are a role's. Must not know: how memory is measured. Invariant: a role's
numbers are the most that any reading in it found.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from opengyre.seams.memory import MemoryHeld
from opengyre.store.observations import Role, RoleChange
from opengyre.views.run_state import RunState

_LEFT = {Role.TRAINING: Role.ROLLOUT, Role.ROLLOUT: Role.TRAINING}
_MIB = 2**20


def role_memory_cells(state: RunState) -> list[dict[str, Any]]:
    """For each cell and role, MiB: what was predicted of it (the most), and what it held at most
    when it began or ended. `resident` is predicted without the program itself."""
    return list(_by_role(state.role_changes))


def _by_role(changes: Iterable[RoleChange]) -> Iterator[dict[str, Any]]:
    told: dict[tuple[int, Role], MemoryHeld] = {}
    seen: dict[tuple[int, Role], MemoryHeld] = {}
    for one in changes:
        if one.memory is None:
            continue
        now, left = (one.cell, one.role), (one.cell, _LEFT[one.role])
        told[now] = one.memory.predicted
        seen[now] = _most(seen.get(now, MemoryHeld()), one.memory.after)
        seen[left] = _most(seen.get(left, MemoryHeld()), one.memory.before)
    for cell, role in sorted(seen):
        if told.get((cell, role), MemoryHeld()) != MemoryHeld():
            yield _row(cell, role, "predicted", told[cell, role])
        yield _row(cell, role, "measured", seen[cell, role])


def switch_cells(state: RunState) -> list[dict[str, Any]]:
    """One line for each change of role: how long it took, and MiB before and after it."""
    return [
        {
            "cell": f"c{one.cell}",
            "becomes": one.role.value,
            "at s": round(one.ended_s, 2),
            "took s": round(one.ended_s - one.started_s, 2),
            "kv before": _mib(one.memory.before.kv_used_bytes),
            "sums before": _mib(one.memory.before.gradients_bytes),
            "resident before": _mib(one.memory.before.resident_bytes),
            "resident after": _mib(one.memory.after.resident_bytes),
        }
        for one in state.role_changes
        if one.memory is not None
    ]


def _most(one: MemoryHeld, other: MemoryHeld) -> MemoryHeld:
    names = MemoryHeld.__struct_fields__
    return MemoryHeld(**{name: max(getattr(one, name), getattr(other, name)) for name in names})


def _row(cell: int, role: Role, what: str, held: MemoryHeld) -> dict[str, Any]:
    names = MemoryHeld.__struct_fields__
    columns = {name.removesuffix("_bytes").replace("_", " "): name for name in names}
    numbers = {column: _mib(getattr(held, name)) for column, name in columns.items()}
    return {"cell": f"c{cell}", "role": role.value, "MiB": what, **numbers}


def _mib(num_bytes: int) -> float:
    return round(num_bytes / _MIB, 1)
