"""From recorded turns to what a group trains, read from the run folder before it is needed.

Owns: the cache of groups that are looked ahead to or assigned. Must not know claims. Invariants:
the same group gives the same bundles whenever and wherever they are made, so a returned micro-step
is redone with the same tokens (P8); at most `lookahead_groups` are held that no step assigned; a
thread that makes rows sees nothing that changes meanwhile, and what nobody waits for any more when
it is done is let go.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace

from opengyre.config.training import TrainingConfig
from opengyre.runtime.book import Book, Execution
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader
from opengyre.store.trees import tree_of
from opengyre.trajectory.account import Reason
from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.bundles import Bundle, Layout
from opengyre.trajectory.groups import GroupRows, GroupSettings, Member, rows_of_group
from opengyre.trajectory.selection import SelectionSettings
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import BrokenRecordError, Role

log = logging.getLogger(__name__)


def group_settings(config: TrainingConfig) -> GroupSettings:
    return GroupSettings(
        selection=SelectionSettings(
            max_paths=config.max_paths,
            trained_roles=tuple(Role(role) for role in config.trained_roles),
        ),
        baseline=Baseline(config.advantage),
        eps=config.advantage_eps,
        layout=Layout(config.layout),
        budget_tokens=config.micro_step_tokens,
    )


class TrainedGroups:
    """`prepare` runs beside the controller's loop, and makes in a thread what is looked ahead to.

    Consumes: what the open step may reach next. Produces: rows. Waits for: a change of the former.
    `_ahead` has the number of turns that each group's rows were made of.
    """

    def __init__(self, book: Book, reader: SegmentReader, *, config: TrainingConfig) -> None:
        self._book = book
        self._reader = reader
        self._settings = group_settings(config)
        self._num_ahead = config.lookahead_groups
        self._groups: dict[str, GroupRows] = {}
        self._ahead: dict[str, int] = {}
        self._changed = asyncio.Event()

    def look_ahead(self, offered: Sequence[str], assigned: Container[str]) -> None:
        """Have the rows of the first of `offered` made in this order; other unassigned ones go."""
        ahead = {one: self._ahead.get(one, 0) for one in offered[: self._num_ahead]}
        for group in (*self._ahead, *offered):
            if group not in ahead and group not in assigned:
                self._groups.pop(group, None)
        self._ahead = ahead
        self._changed.set()

    async def prepare(self, wake: Callable[[], None]) -> None:
        """Until it is cancelled; `wake` is called when a group is prepared."""
        while True:
            self._changed.clear()
            group = next((one for one in self._ahead if one not in self._groups), None)
            if group is None:
                await self._changed.wait()
                continue
            closed = [
                replace(one, turns=[*one.turns], given_up=[*one.given_up])
                for one in self.executions_of(group)
            ]
            num_turns = self._num_turns(group)
            rows = await asyncio.to_thread(self._rows_of, group, closed)
            if group in self._ahead:
                self._ahead[group] = num_turns
                self._groups[group] = rows
                wake()

    def prepared(self, group: str) -> Sequence[Bundle] | None:
        """What a ready group trains, in member order; None while that is not prepared.

        Turns that are told late, by a gateway that came back, are seen until it is assigned.
        """
        rows = self._groups.get(group)
        if rows is None:
            return None
        if group in self._ahead and self._ahead[group] != self._num_turns(group):
            del self._groups[group]
            self._changed.set()
            return None
        return rows.bundles

    def bundles_of(self, group: str) -> Sequence[Bundle]:
        """What a ready group trains, in member order."""
        return self.group(group).bundles

    def group(self, group: str) -> GroupRows:
        """Made at once if it is not prepared."""
        if group not in self._groups:
            self._groups[group] = self._rows_of(group, self.executions_of(group))
        return self._groups[group]

    def executions_of(self, group: str) -> list[Execution]:
        return [self._book.executions[name] for name in self._book.members[group]]

    def forget(self, group: str) -> None:
        """A consumed group is not asked for again."""
        self._groups.pop(group, None)
        self._ahead.pop(group, None)

    def _num_turns(self, group: str) -> int:
        return sum(len(one.turns) + len(one.given_up) for one in self.executions_of(group))

    def _rows_of(self, group: str, closed: Sequence[Execution]) -> GroupRows:
        members = [self._member(one) for one in closed]
        return rows_of_group(group, members, settings=self._settings)

    def _member(self, one: Execution) -> Member:
        try:
            tree = tree_of(self._read(one.turns), given_up=self._read(one.given_up))
        except (BoundaryError, BrokenRecordError) as error:
            log.error("%s takes no part, its records cannot be read: %s", one.execution, error)
            return _unreadable(one)
        return Member(
            execution=one.execution,
            tree=tree,
            reward=one.value,
            seed=one.seed,
            exclusion=one.exclusion or Reason.NO_VERDICT,
            masked=one.masked,
        )

    def _read(self, turns: Iterable[TurnRecord]) -> Iterator[TokenRecord]:
        return (self._reader.read(turn.ref) for turn in turns)


def _unreadable(one: Execution) -> Member:
    return Member(
        execution=one.execution,
        tree=Tree(),
        reward=None,
        seed=one.seed,
        exclusion=Reason.UNREADABLE,
    )
