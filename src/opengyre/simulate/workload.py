"""How long executions last, and whether they get a verdict.

Owns: the workloads and their draws. Must not know: policies, engines, time.
Invariants: a draw is a function of (seed, group, member) alone, so that every policy sees the
same trace; the mean of the drawn durations before any cap is `mean_s`, whatever the sigmas.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import ConfigError
from opengyre.simulate.draws import Purpose, normal, uniform

MAX_DURATION_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """`duration_s` seconds of work on a full engine. `is_capped`: a cap ended it.
    `has_verdict` is False for a discarded one, or if there is nothing to say; `reward` is what
    it says else: the same for all of a group, or another for each."""

    duration_s: float
    is_capped: bool
    has_verdict: bool
    reward: float = 1.0


class Workload(Protocol):
    """Executions of evaluation are drawn with negative group numbers."""

    @property
    def mean_s(self) -> float:
        """Mean duration before caps: the length of a mean group's work."""
        ...

    def draw(self, seed: int, group: int, member: int) -> Draw: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endings:
    """How executions end apart from their length. Caps count an execution's work: time in which
    its requests are held is not charged to it.

    harness_cap_s: the harness's own limit; what is there is graded.
    overall_cap_s: ends an execution that came so far; its verdict is lost unless
        `is_overall_graded`.
    no_verdict_rate: share of executions without a verdict. void_rate: share of groups none of
    whose members has one. zero_variance_share: share of groups whose verdicts are all equal.
    """

    harness_cap_s: float | None = None
    overall_cap_s: float | None = None
    is_overall_graded: bool = False
    no_verdict_rate: float = 0.0
    void_rate: float = 0.0
    zero_variance_share: float = 0.0

    def __post_init__(self) -> None:
        for cap_s in (self.harness_cap_s, self.overall_cap_s):
            _require(cap_s is None or cap_s > 0, "a cap is above 0 s")
        _require(0 <= self.no_verdict_rate <= 1, "0 <= no_verdict_rate <= 1")
        _require(0 <= self.void_rate < 1, "0 <= void_rate < 1")
        _require(0 <= self.zero_variance_share <= 1, "0 <= zero_variance_share <= 1")

    def end(self, duration_s: float, *, seed: int, group: int, member: int) -> Draw:
        """What becomes of an execution that would last `duration_s`."""
        is_capped, has_verdict = False, True
        if self.harness_cap_s is not None and duration_s > self.harness_cap_s:
            duration_s, is_capped = self.harness_cap_s, True
        if self.overall_cap_s is not None and duration_s > self.overall_cap_s:
            duration_s, is_capped = self.overall_cap_s, True
            has_verdict = self.is_overall_graded
        if self.no_verdict_rate > 0:
            drawn = uniform(seed, Purpose.VERDICT, group, member)
            has_verdict = has_verdict and drawn >= self.no_verdict_rate
        if self.void_rate > 0:
            has_verdict = has_verdict and uniform(seed, Purpose.VOID, group) >= self.void_rate
        share = self.zero_variance_share
        is_flat = share > 0 and uniform(seed, Purpose.VARIANCE, group) < share
        reward = 1.0 if is_flat else 1.0 / (1 + member)
        return Draw(
            duration_s=duration_s, is_capped=is_capped, has_verdict=has_verdict, reward=reward
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalWorkload:
    """Durations mean_s exp(sb z_group - sb^2/2) exp(sw z_member - sw^2/2), then caps."""

    mean_s: float
    sigma_between: float = 0.0
    sigma_within: float = 0.0
    endings: Endings = field(default_factory=Endings)

    def __post_init__(self) -> None:
        _require(self.mean_s > 0, "mean_s > 0")
        _require(self.sigma_between >= 0 and self.sigma_within >= 0, "sigmas >= 0")

    def draw(self, seed: int, group: int, member: int) -> Draw:
        between, within = self.sigma_between, self.sigma_within
        exponent = between * normal(seed, Purpose.GROUP_LENGTH, group) - between**2 / 2
        exponent += within * normal(seed, Purpose.MEMBER_LENGTH, group, member) - within**2 / 2
        duration_s = self.mean_s * math.exp(exponent)
        return self.endings.end(duration_s, seed=seed, group=group, member=member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded execution; without a verdict it stays without one. `is_capped`: a time-out
    ended it when it was recorded."""

    duration_s: float
    has_verdict: bool = True
    is_capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalWorkload:
    """Each simulated group is a recorded one, drawn with replacement; its members are the
    recorded ones in order, and drawn with replacement among them when more are asked for."""

    groups: tuple[tuple[Recorded, ...], ...]
    endings: Endings = field(default_factory=Endings)

    def __post_init__(self) -> None:
        _require(len(self.groups) > 0, "there is a group")
        for group in self.groups:
            _require(len(group) > 0, "every group has a member")
            _require(all(one.duration_s >= 0 for one in group), "durations >= 0 s")
        _require(self.mean_s > 0, "the mean duration is above 0 s")

    @property
    def mean_s(self) -> float:
        num = sum(len(group) for group in self.groups)
        return math.fsum(one.duration_s for group in self.groups for one in group) / num

    def draw(self, seed: int, group: int, member: int) -> Draw:
        drawn = uniform(seed, Purpose.SAMPLE, group)
        recorded = self.groups[int(drawn * len(self.groups))]
        index = member
        if member >= len(recorded):
            index = int(uniform(seed, Purpose.MEMBER_LENGTH, group, member) * len(recorded))
        one = recorded[index]
        end = self.endings.end(one.duration_s, seed=seed, group=group, member=member)
        return Draw(
            duration_s=end.duration_s,
            is_capped=end.is_capped or one.is_capped,
            has_verdict=end.has_verdict and one.has_verdict,
            reward=end.reward,
        )


def read_csv(text: str) -> tuple[tuple[Recorded, ...], ...]:
    """Groups from lines with the columns `group`, `duration_s` and, if wanted, `has_verdict`
    (1, 0, true, false). Groups keep the order of their first line. Raises ConfigError."""
    lines = csv.reader(text.removeprefix("\ufeff").splitlines())
    try:
        columns = [name.strip() for name in next(lines, [])]
        _check_columns(columns)
        groups: dict[str, list[Recorded]] = {}
        for cells in lines:
            if cells:
                row = _row(columns, cells, lines.line_num)
                groups.setdefault(row["group"], []).append(_recorded(row, lines.line_num))
    except csv.Error as error:
        raise ConfigError(f"line {lines.line_num}: {error}") from error
    if not any(one.duration_s > 0 for group in groups.values() for one in group):
        raise ConfigError("expected lines after the first, one with a duration_s above 0")
    return tuple(tuple(group) for group in groups.values())


def _check_columns(columns: list[str]) -> None:
    for name in ("group", "duration_s"):
        if columns.count(name) != 1:
            raise ConfigError(
                f"line 1: expected the columns group, duration_s and, if wanted, has_verdict, "
                f"with commas between; {name!r} is there {columns.count(name)} times"
            )


def _row(columns: list[str], cells: list[str], number: int) -> dict[str, str]:
    if len(cells) != len(columns):
        raise ConfigError(
            f"line {number}: expected {len(columns)} values as in the first line, "
            f"there are {len(cells)}"
        )
    row = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
    if not row["group"]:
        raise ConfigError(f"line {number}: group is empty: expected a name")
    return row


def _recorded(row: dict[str, str], number: int) -> Recorded:
    verdict, duration = row.get("has_verdict") or "1", row["duration_s"]
    has_verdict = _WORDS.get(verdict.lower())
    if has_verdict is None:
        raise ConfigError(f"line {number}: has_verdict = {verdict!r}: expected {', '.join(_WORDS)}")
    try:
        duration_s = float(duration)
    except ValueError:
        duration_s = math.nan
    if not 0 <= duration_s <= MAX_DURATION_S:
        raise ConfigError(
            f"line {number}: duration_s = {duration!r}: expected a number of seconds from 0 to "
            f"{MAX_DURATION_S:g}"
        )
    return Recorded(duration_s=duration_s, has_verdict=has_verdict)


_WORDS = {"1": True, "true": True, "0": False, "false": False}


def to_csv(groups: Sequence[Sequence[Recorded]]) -> str:
    """The text that `read_csv` reads."""
    lines = ["group,duration_s,has_verdict"]
    for number, group in enumerate(groups):
        lines.extend(f"{number},{one.duration_s!r},{int(one.has_verdict)}" for one in group)
    return "\n".join(lines) + "\n"


def _require(is_true: bool, words: str) -> None:
    if not is_true:
        raise InvariantError(f"workload: {words}")
