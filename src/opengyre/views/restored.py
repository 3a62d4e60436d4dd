"""The turns of one execution as their bytes tell them, each with its line of tokens.

Owns: lines, restored without the processor's own tree, so that one checks the other. Must not know
what was trained. Invariant: memory is proportional to what is new in each turn.
"""

import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.trajectory.account import Reason

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """One attempt of a turn: its line is the first `num_kept` tokens of `parent`'s, then its new
    prompt ids, then what was sampled."""

    turn: TurnRecord
    parent: "Line | None"
    num_kept: int
    new_ids: "array[int]"
    completion: "array[int]"
    logprobs: "array[float]"

    @property
    def sampled_begin(self) -> int:
        return self.num_kept + len(self.new_ids)

    @property
    def num_tokens(self) -> int:
        return self.sampled_begin + len(self.completion)

    def pieces(self) -> Iterator[tuple["Line", Range]]:
        """(whose, depths [begin, end)) from its end to its first token; empty ones are left out."""
        end, at = self.num_tokens, self
        while True:
            if at.num_kept < end:
                yield at, (at.num_kept, end)
                end = at.num_kept
            if at.parent is None:
                return
            at = at.parent

    def parts(self, ranges: Sequence[Range]) -> Iterator[tuple["Line", Range]]:
        """Whose tokens the depths in `ranges` are, in this order."""
        pieces = list(self.pieces())[::-1]
        begins = [begin for _, (begin, _) in pieces]
        for place, part in cut(ranges, begins, self.num_tokens):
            yield pieces[place][0], part

    @property
    def ids_crc32(self) -> int:
        """Over all ids of the line as int32 little endian."""
        crc = 0
        for one, (begin, end) in reversed(list(self.pieces())):
            own = one.new_ids + one.completion
            crc = zlib.crc32(own[: end - begin].tobytes(), crc)
        return crc


@dataclass(slots=True)
class Lines:
    """All attempts of one execution in the order in which they were told; those numbered up to
    `num_given_up_turns` belong to launches that were given up."""

    num_given_up_turns: int = 0
    all: list[Line] = field(default_factory=list)
    _standing: dict[str, Line] = field(default_factory=dict)
    _by_attempt: dict[tuple[str, int], Line] = field(default_factory=dict)

    def add(self, record: TokenRecord) -> Line:
        turn = record.header
        parent = self.parent_of(turn)
        line = Line(
            turn=turn,
            parent=parent,
            num_kept=0 if parent is None else min(turn.num_kept_tokens, parent.num_tokens),
            new_ids=array("i", record.new_prompt_ids),
            completion=array("i", record.completion_ids),
            logprobs=array("f", record.logprobs),
        )
        self.all.append(line)
        self._by_attempt[turn.turn, turn.attempt] = line
        before = self._standing.get(turn.turn)
        if before is None or turn.is_committed or not before.turn.is_committed:
            self._standing[turn.turn] = line
        return line

    def parent_of(self, turn: TurnRecord) -> Line | None:
        """The attempt that it names; older records name none and mean the standing one."""
        if turn.parent_attempt is None:
            return self._standing.get(turn.parent)
        return self._by_attempt.get((turn.parent, turn.parent_attempt))

    def standing(self, turn: str) -> Line | None:
        """The last committed attempt, else the last."""
        return self._standing.get(turn)

    def reason_of(self, line: Line) -> Reason | None:
        """Why what it sampled cannot be trained, whoever its execution is; None if it can."""
        if 0 < self.num_given_up_turns >= turn_number(line.turn.turn):
            return Reason.RELAUNCHED
        if not line.turn.is_committed:
            return Reason.NOT_COMMITTED
        is_standing = self._standing[line.turn.turn] is line
        return None if is_standing else Reason.SUPERSEDED_ATTEMPT

    @property
    def num_sampled(self) -> int:
        return sum(len(line.completion) for line in self.all)

    def dropped(self) -> Counter[str]:
        """Sampled tokens that their own turn drops, by reason."""
        found: Counter[str] = Counter()
        for line in self.all:
            reason = self.reason_of(line)
            if reason is not None and line.completion:
                found[reason.value] += len(line.completion)
        return found


def cut(ranges: Sequence[Range], begins: Sequence[int], end: int) -> Iterator[tuple[int, Range]]:
    """(place, part) of `ranges`, cut where the pieces meet that begin at `begins`, the last of
    which ends at `end`. What lies outside of all is left out."""
    for start, stop in ranges:
        place = max(bisect_right(begins, start) - 1, 0)
        while place < len(begins) and begins[place] < stop:
            edge = begins[place + 1] if place + 1 < len(begins) else end
            part = (max(start, begins[place]), min(stop, edge))
            if part[0] < part[1]:
                yield place, part
            place += 1


def turn_number(turn: str) -> int:
    """7 of "e000123.t7"."""
    return int(turn.rpartition(".t")[2])
