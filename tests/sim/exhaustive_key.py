"""One key for all states that differ in nothing that matters.

Owns: the canonical form of scheduler and world together. Must not know: any rule. It walks
whatever fields it finds, so that a new field of the scheduler makes more states, never fewer;
a type it does not know raises.

What is folded:
- Executions of one group, and groups of one version, lose their names. What is left of a name is
  where it stands in every ordered collection, its record, and the multiset of its members. The
  scheduler uses numbers for order alone: of the queue, which keeps its order here, and of ready
  groups of one version, which differ in nothing that is still read. So renaming commutes with
  every fact and plan.
- Times are relative to now. A deadline that has passed is passed; an age beyond every limit is
  one age (`horizon_s`).
- Commands under way are named by their place in the world's lines.
- Words (reasons) are either there or not.
- Fields of LEFT_OUT, each for the reason beside it. Statistics that no rule reads are checked
  against the world at every event before states are folded.
"""

import dataclasses
import marshal
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from opengyre.control import commands as c
from opengyre.control.cells import EngineState
from opengyre.control.groups import GroupState
from opengyre.control.outbox import Outbox

LEFT_OUT: dict[str, frozenset[str]] = {
    # constants; statistics; words; absolute counts, of which w, queue and displaced are told by
    # the executions themselves
    "RunState": frozenset(
        [
            *("config", "refused", "num_by_outcome", "num_short_steps", "num_empty_steps"),
            *("why_stays", "counts", "policy", "next_cells", "publish_deadlines"),
        ]
    ),
    # indexes over engines and cells, compared with a walk over them at every event; stale
    # entries of the two heaps are skipped by whoever reads them
    "Topology": frozenset(
        [
            *("engines_by_state", "cells_by_role", "must_return", "to_enter", "suspects"),
            *("capacity", "num_free_open", "cells_revision", "_free"),
        ]
    ),
    # by_id and unfinished hold what the records say; the rest are counts of ids given
    "ExecutionBook": frozenset(["by_id", "unfinished", "num_dispatched", "num_groups"]),
    # indexes and counts over the groups' own states; `revision` is looked at in every `decide`
    "GroupBook": frozenset(
        ["by_id", "num_by_state", "revision", "_live_by_version", "_ready_by_version"]
    ),
    "StepRecord": frozenset({"revision", "members_by_state"}),
    # the name is folded; the members that still matter point to their group
    "Group": frozenset(["group", "number", "members"]),
    # its record stands in its group's
    "Execution": frozenset({"execution", "group"}),
    "Burst": frozenset({"number"}),
    "SupplyTimer": frozenset({"hold_s"}),
    "Member": frozenset({"drop_reason"}),
    # what the world keeps to check by, and what the scheduler's records say as well
    "World": frozenset(
        [
            *("route", "launches", "cancelling", "ungraded", "burst", "end", "is_ending"),
            *("group_of", "num_open_by_group", "version_by_group", "consumed"),
            *("num_dispatched", "num_launched", "num_closed"),
        ]
    ),
    # one life is like another; the same number stands on both sides
    "Machine": frozenset({"engine", "cell", "incarnation"}),
    "Engine": frozenset({"incarnation"}),
}
IS_PENDING_ONLY = frozenset(["checkpoint", "expose", "abandon", "reroute"])
REFERENCES = frozenset(["command_id", "command", "admit", "drop"]) | IS_PENDING_ONLY
SINCE = frozenset(["since_s", "due_since_s", "short_since_s", "stuck_since_s"])
GONE, WORDS, LABEL = "gone", "words", "label"
SCALARS = frozenset({bool, int, float, type(None)})
Token = Callable[[Any, Any], str | int | float | None]
Fields = tuple[Callable[[Any], tuple[Any, ...]], list[tuple[str, Token]]]

MEANINGLESS: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("Engine", "due_since_s"): lambda one: (
        one.state not in (EngineState.PUBLISHING, EngineState.QUARANTINED)
    ),
    ("Engine", "verified_version"): lambda one: one.state is EngineState.ABSENT,
    ("Engine", "due_version"): lambda one: one.state is EngineState.ABSENT,
    ("Group", "num_valid"): lambda one: one.state is not GroupState.LIVE,
    ("Group", "num_open"): lambda one: one.state is not GroupState.LIVE,
    ("Group", "lowest"): lambda one: one.state is not GroupState.LIVE,
    ("Group", "highest"): lambda one: one.state is not GroupState.LIVE,
}


class Keyer:
    """`key(run, world, now_s)` of a state; equal keys: equal up to names, or equal in names too
    without `is_folding`."""

    def __init__(
        self, engines: frozenset[str], horizon_s: float, *, is_folding: bool = True
    ) -> None:
        self._engines, self._horizon_s, self._is_folding = engines, horizon_s, is_folding
        self._fields: dict[type, Fields] = {}
        self._walks: dict[type, Callable[[Any], None]] = {
            str: self._string,
            list: self._sequence,
            tuple: self._sequence,
            deque: self._sequence,
            dict: self._mapping,
            OrderedDict: self._mapping,
            Outbox: lambda outbox: None,
        }

    def key(self, run: Any, world: Any, now_s: float) -> bytes:
        self._run, self._now_s = run, now_s
        self._out: list[Any] = []
        self._spots: dict[str, list[int]] = {}
        self._groups: dict[str, Any] = dict(run.groups.by_id)
        self._places: dict[int, str] = {}
        self._is_record = False
        self._note_places(world)
        self._walk(world)
        self._walk(run)
        out = self._out
        parts = [marshal.dumps(out, 2), *self._records(run, world)]
        return blake2b(b"|".join(parts), digest_size=16).digest()

    def _note_places(self, world: Any) -> None:
        is_pending = self._run.outbox.is_pending
        lines = [(one.engine, one.line) for one in world.machines.values()]
        for name, line in (*lines, ("loose", world.loose)):
            for index, command in enumerate(line):
                if is_pending(command.command_id):
                    self._places[command.command_id] = f"{name}.{index}"
        for execution, command_id in world.launches.items():
            if is_pending(command_id):
                self._places[command_id] = f"launch of {execution}"

    def _records(self, run: Any, world: Any) -> list[bytes]:
        """One signature for each group: itself, its spots, the sorted ones of its members."""
        members: dict[str, list[bytes]] = {name: [] for name in self._groups}
        for name, execution in run.executions.by_id.items():
            group = execution.group.group
            self._groups.setdefault(group, execution.group)
            truth = world.route.get(name, "") + ("?" if name in world.launches else "")
            members.setdefault(group, []).append(self._signature(name, execution, truth))
        return sorted(
            self._signature(name, group, tuple(sorted(members.get(name, ()))))
            for name, group in self._groups.items()
        )

    def _signature(self, name: str, record: Any, rest: Any) -> bytes:
        self._out = []
        self._is_record = True
        self._walk_fields(record)
        kept_name = None if self._is_folding else name
        return marshal.dumps((kept_name, self._out, self._spots.get(name, []), rest), 2)

    # ---- walking

    def _walk(self, value: Any) -> None:
        kind = type(value)
        if kind in SCALARS:
            self._out.append(value)
            return
        walk = self._walks.get(kind)
        if walk is None:
            walk = self._walks[kind] = self._new_walk(kind)
        walk(value)

    def _new_walk(self, kind: type) -> Callable[[Any], None]:
        if issubclass(kind, Enum):
            return lambda value: self._out.append(value.name)
        if kind.__name__ == "Execution":
            return lambda value: self._label(value.execution)
        if kind.__name__ == "Group":
            return self._group
        is_ours = kind.__module__.startswith(("opengyre.control.", "tests.sim.exhaustive"))
        if is_ours and (dataclasses.is_dataclass(kind) or hasattr(kind, "__dict__")):
            return self._walk_fields
        raise TypeError(f"a state holds a {kind}: say how it is compared")

    def _walk_fields(self, value: Any) -> None:
        kind = type(value)
        fields = self._fields.get(kind)
        if fields is None:
            fields = self._fields[kind] = self._plan(kind, value)
        plain, special = fields
        out = self._out
        out.append(kind.__name__)
        for one in plain(value):
            if type(one) in SCALARS:
                out.append(one)
            else:
                self._walk(one)
        for name, token in special:
            out.append(token(value, getattr(value, name)))

    def _plan(self, kind: type, value: Any) -> Fields:
        if dataclasses.is_dataclass(kind):
            names = [one.name for one in dataclasses.fields(kind)]
        else:
            names = sorted(vars(value))
        left_out = LEFT_OUT.get(kind.__name__, frozenset())
        if issubclass(kind, c.Command):
            left_out = frozenset({"reason"})
        tokens = {name: self._token(kind, name) for name in names if name not in left_out}
        plain = [name for name, token in tokens.items() if token is None]
        special = [(name, token) for name, token in tokens.items() if token is not None]
        return _getter(plain), special

    def _token(self, kind: type, name: str) -> Token | None:
        """How the field becomes one token, or None: it is walked."""
        is_meaningless = MEANINGLESS.get((kind.__name__, name))
        token = self._plain_token(name)
        if is_meaningless is None:
            return token
        return lambda owner, value: (
            None if is_meaningless(owner) else value if token is None else token(owner, value)
        )

    def _plain_token(self, name: str) -> Token | None:
        if name in SINCE:
            return lambda _, value: self._age_s(value)
        if name.endswith("_s"):
            return lambda _, value: self._left_s(value)
        if name in REFERENCES:
            return lambda _, value: self._reference(name, value)
        return None

    def _age_s(self, since_s: float | None) -> float | None:
        return None if since_s is None else min(self._now_s - since_s, self._horizon_s)

    def _left_s(self, at_s: float | None) -> float | None:
        return None if at_s is None else max(at_s - self._now_s, 0.0)

    def _reference(self, name: str, command_id: Any) -> str | None:
        if command_id is None:
            return None
        if not isinstance(command_id, int):
            raise TypeError(f"{name} holds {command_id!r}, no command's id")
        gone = None if name in IS_PENDING_ONLY else GONE
        return self._places.get(command_id, gone)

    def _string(self, value: str) -> None:
        if value in self._engines:
            self._out.append(value)
        elif value[1:].isdigit() and len(value) == 7 and value[0] == "e":
            is_there = value in self._run.executions.by_id
            self._label(value) if is_there else self._out.append(GONE)
        elif value[1:].isdigit() and len(value) == 6 and value[0] == "g":
            is_there = value in self._groups
            self._label(value) if is_there else self._out.append(GONE)
        else:
            self._out.append(WORDS)

    def _group(self, group: Any) -> None:
        self._groups.setdefault(group.group, group)
        self._label(group.group)

    def _label(self, name: str) -> None:
        if self._is_record:
            raise TypeError(f"a record names {name}: say how it is compared")
        self._spots.setdefault(name, []).append(len(self._out))
        self._out.append(LABEL)

    def _sequence(self, values: Any) -> None:
        self._out.append(len(values))
        for value in values:
            self._walk(value)

    def _mapping(self, values: dict[Any, Any]) -> None:
        """In order; a count of 0 is as good as none."""
        num = 0
        spot = len(self._out)
        self._out.append(0)
        for name, value in values.items():
            if type(value) is int and value == 0:
                continue
            num += 1
            self._walk(name)
            if value is not None:
                self._walk(value)
        self._out[spot] = num


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
