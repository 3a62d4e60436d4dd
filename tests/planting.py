"""The rows of a recorded run, to be damaged so that a check has something to find."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import CommandId, execution_id
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue, kind_of
from opengyre.store.journal import Row
from opengyre.store.segments import SegmentReader
from opengyre.views.findings import CheckResult
from opengyre.views.verify import Recorded, verify_rows


@dataclass
class Planting:
    """The rows of a run, to be damaged."""

    rows: list[Row]
    tokens: Path

    def where(self, kind: type[Any], **fields: Any) -> list[int]:
        return [
            place
            for place, row in enumerate(self.rows)
            if isinstance(row.value, kind)
            and all(getattr(row.value, name) == value for name, value in fields.items())
        ]

    def command(self, kind: type[c.Command], **fields: Any) -> int:
        """The first plan that holds such a command."""
        return next(
            place
            for place in self.where(c.Plan)
            for one in self.rows[place].value.commands
            if isinstance(one, kind)
            and all(getattr(one, name) == value for name, value in fields.items())
        )

    def change(self, place: int, **fields: Any) -> None:
        value: Any = self.rows[place].value
        changed = msgspec.structs.replace(value, **fields)
        self.rows[place] = replace(self.rows[place], value=changed)

    def drop(self, place: int) -> None:
        del self.rows[place]

    def insert(self, place: int, value: JournalValue) -> None:
        now_s = self.rows[place - 1].now_s
        self.rows.insert(place, Row(seq=0, now_s=now_s, kind=kind_of(value), value=value))

    def insert_plan(self, place: int, kind: type[Any], **fields: Any) -> None:
        command = kind(command_id=CommandId(10_000 + place), reason="planted", **fields)
        self.insert(place, c.Plan(commands=(command,)))

    def move(self, place: int, to: int) -> None:
        self.rows.insert(to, self.rows.pop(place))

    def change_turn(self, name: str, **fields: Any) -> None:
        (place,) = [n for n in self.where(seen.TurnRecorded) if self.turn(n).turn == name]
        turn = msgspec.structs.replace(self.turn(place), **fields)
        self.change(place, turn=turn)

    def turn(self, place: int) -> Any:
        value: Any = self.rows[place].value
        return value.turn

    def change_path(self, **fields: Any) -> None:
        place = self.where(seen.MicroStepDone)[0]
        value: Any = self.rows[place].value
        self.change(place, paths=[msgspec.structs.replace(value.paths[0], **fields)])

    def change_outcome(self, number: int, outcome: f.Outcome) -> None:
        place = self.where(f.ExecutionClosed, execution=execution_id(number))[0]
        value: Any = self.rows[place].value
        self.rows[place] = replace(self.rows[place], value=replace(value, outcome=outcome))

    def results(self, recorded: Recorded | None = None) -> dict[str, CheckResult]:
        found = verify_rows(self.rows, SegmentReader(self.tokens), recorded=recorded)
        return {one.promise: one for one in found}
