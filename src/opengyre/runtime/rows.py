"""From recorded turns to the rows of a group, read from the run folder when they are needed.

Owns: the cache of rows of groups that are offered or assigned. Invariant: the same group gives
the same rows at each call, so a returned micro-step is redone with the same tokens (P8).
"""

from collections.abc import Sequence

from opengyre.config.training import TrainingConfig
from opengyre.runtime.book import Book
from opengyre.store.segments import SegmentReader
from opengyre.trainer.wire import turn_tokens
from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.groups import GroupRows, Member, Row, rows_of_group
from opengyre.trajectory.rows import paths_of


class TrainingRows:
    def __init__(self, book: Book, reader: SegmentReader, *, config: TrainingConfig) -> None:
        self._book = book
        self._reader = reader
        self._config = config
        self._groups: dict[str, GroupRows] = {}

    def rows_of(self, group: str) -> Sequence[Row]:
        """Trainable rows of a ready group, in member order."""
        return self.group(group).rows

    def group(self, group: str) -> GroupRows:
        if group not in self._groups:
            members = [self._member(name) for name in self._book.members[group]]
            self._groups[group] = rows_of_group(
                group,
                members,
                baseline=Baseline(self._config.advantage),
                eps=self._config.advantage_eps,
            )
        return self._groups[group]

    def forget(self, group: str) -> None:
        """A consumed group is not asked for again."""
        self._groups.pop(group, None)

    def _member(self, name: str) -> Member:
        one = self._book.executions[name]
        records = [self._reader.read(turn.ref) for turn in one.turns]
        paths, account = paths_of(
            [turn_tokens(record) for record in records],
            untrained_roles=self._config.untrained_roles,
        )
        return Member(execution=name, reward=one.reward, paths=paths, account=account)
