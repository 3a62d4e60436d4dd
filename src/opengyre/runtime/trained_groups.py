"""From recorded turns to what a group trains, read from the run folder when it is needed.

Owns: the cache of groups that are offered or assigned. Invariant: the same group gives the same
bundles at each call, so a returned micro-step is redone with the same tokens (P8).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

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
    def __init__(self, book: Book, reader: SegmentReader, *, config: TrainingConfig) -> None:
        self._book = book
        self._reader = reader
        self._settings = group_settings(config)
        self._groups: dict[str, GroupRows] = {}

    def bundles_of(self, group: str) -> Sequence[Bundle]:
        """What a ready group trains, in member order."""
        return self.group(group).bundles

    def group(self, group: str) -> GroupRows:
        if group not in self._groups:
            members = [self._member(one) for one in self.executions_of(group)]
            self._groups[group] = rows_of_group(group, members, settings=self._settings)
        return self._groups[group]

    def executions_of(self, group: str) -> list[Execution]:
        return [self._book.executions[name] for name in self._book.members[group]]

    def forget(self, group: str) -> None:
        """A consumed group is not asked for again."""
        self._groups.pop(group, None)

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
