"""From the turns of one execution to training paths, with every sampled token accounted for.

Owns: which tokens are trained, masked or dropped, and why. Must not know where records are
stored or what a group is. Invariants: only tokens the policy sampled are trained; each sampled
token is trained in one path at most; trained + masked + dropped = sampled.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a sampled token is not trained."""

    NOT_COMMITTED = "not_committed"
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    UNTRAINED_ROLE = "untrained_role"
    NO_CONTEXT = "no_context"
    NO_VARIANCE = "no_variance"
    NO_VERDICT = "no_verdict"


class BrokenRecordError(ValueError):
    """The turns of an execution contradict each other; the text names the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """One attempt of a turn. `completion_ids`, `logprobs` and `versions` have one length.

    `parent` is a turn id or ""; the prompt is the first `num_kept_tokens` ids of the parent's
    prompt + completion, then `new_prompt_ids`. `versions`: policy_version that sampled each id.
    """

    turn: str
    attempt: int
    parent: str
    fork_reason: str
    role: str
    is_committed: bool
    num_kept_tokens: int
    new_prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One line of turns. All arrays have length T in tokens; `mask` is 1 where trained."""

    turns: tuple[str, ...]
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Where every sampled token of some executions ended."""

    sampled: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_balanced(self) -> bool:
        ended = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        return ended == self.sampled

    def __add__(self, other: "TokenAccount") -> "TokenAccount":
        return TokenAccount(
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
            masked=dict(Counter(self.masked) + Counter(other.masked)),
            dropped=dict(Counter(self.dropped) + Counter(other.dropped)),
        )


UNTRAINED_ROLES = ("side",)


def paths_of(
    turns: Sequence[TurnTokens], *, untrained_roles: Sequence[str] = UNTRAINED_ROLES
) -> tuple[list[Path], TokenAccount]:
    """Paths of one execution in the order of their first turn, and the account of its tokens.

    `turns` in the order in which they were received. A turn that extends the whole of its
    parent continues the parent's path unless another turn already did; every other turn with
    trainable tokens starts a path in which what it kept is context. Turns of `untrained_roles` are
    context only. Raises BrokenRecordError.
    """
    builder = _Builder(turns, untrained_roles)
    for turn in turns:
        builder.add(turn)
    return builder.paths(), builder.account()


def drop_all(account: TokenAccount, reason: Reason) -> TokenAccount:
    """The account after nothing of these executions is trained."""
    lost = account.trained + sum(account.masked.values())
    dropped = Counter(account.dropped) + Counter({str(reason): lost})
    return TokenAccount(sampled=account.sampled, dropped=dict(dropped))


def mask_trained(account: TokenAccount, reason: Reason) -> TokenAccount:
    """The account after what would have been trained is masked."""
    masked = Counter(account.masked) + Counter({str(reason): account.trained})
    return TokenAccount(sampled=account.sampled, masked=dict(masked), dropped=account.dropped)


@dataclass(slots=True)
class _Line:
    """A path being built."""

    turns: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def extend(self, ids: Sequence[int]) -> None:
        """Tokens the policy did not sample here: context only."""
        self.token_ids.extend(ids)
        self.mask.extend([0] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([0] * len(ids))

    def extend_sampled(self, turn: TurnTokens, trained: Sequence[int]) -> None:
        self.turns.append(turn.turn)
        self.token_ids.extend(turn.completion_ids)
        self.mask.extend(trained)
        self.logprobs.extend(turn.logprobs)
        self.versions.extend(turn.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A turn's prompt + completion: the first `num_tokens` of `token_ids`, which only grows."""

    token_ids: list[int]
    num_tokens: int


_NO_PLACE = _Place(token_ids=[], num_tokens=0)


class _Builder:
    def __init__(self, turns: Sequence[TurnTokens], untrained_roles: Sequence[str]) -> None:
        self._untrained_roles = untrained_roles
        self._kept_attempts = _kept_attempts(turns)
        self._place_by_turn: dict[str, _Place] = {}
        self._open_line_by_turn: dict[str, _Line] = {}
        self._lines: list[_Line] = []
        self._sampled = 0
        self._trained = 0
        self._masked: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def add(self, turn: TurnTokens) -> None:
        _check(turn)
        parent = self._parent_of(turn)
        self._sampled += len(turn.completion_ids)
        if self._kept_attempts[turn.turn] != turn.attempt:
            reason = Reason.SUPERSEDED_ATTEMPT if turn.is_committed else Reason.NOT_COMMITTED
            self._dropped[reason] += len(turn.completion_ids)
        elif turn.is_committed:
            line = self._line_for(turn, parent)
            line.extend_sampled(turn, self._mask_of(turn, has_context=bool(line.token_ids)))
            self._open_line_by_turn[turn.turn] = line
            self._place(turn, line.token_ids)
        else:
            self._dropped[Reason.NOT_COMMITTED] += len(turn.completion_ids)
            self._place(turn, [*_prompt(turn, parent), *turn.completion_ids])

    def paths(self) -> list[Path]:
        return [
            Path(
                turns=tuple(line.turns),
                token_ids=line.token_ids,
                mask=line.mask,
                logprobs=line.logprobs,
                versions=line.versions,
            )
            for line in self._lines
            if any(line.mask)
        ]

    def account(self) -> TokenAccount:
        return TokenAccount(
            sampled=self._sampled,
            trained=self._trained,
            masked=dict(self._masked),
            dropped=dict(self._dropped),
        )

    def _place(self, turn: TurnTokens, token_ids: list[int]) -> None:
        self._place_by_turn[turn.turn] = _Place(token_ids=token_ids, num_tokens=len(token_ids))

    def _parent_of(self, turn: TurnTokens) -> _Place:
        if not turn.parent:
            return _NO_PLACE
        parent = self._place_by_turn.get(turn.parent)
        if parent is None or turn.num_kept_tokens > parent.num_tokens:
            raise BrokenRecordError(f"{turn.turn} keeps tokens of {turn.parent} that are not there")
        return parent

    def _line_for(self, turn: TurnTokens, parent: _Place) -> _Line:
        """The parent's line if this turn extends all of it and is the first to do so."""
        line = self._open_line_by_turn.get(turn.parent)
        extends = not turn.fork_reason and turn.num_kept_tokens == parent.num_tokens
        if line is not None and extends:
            del self._open_line_by_turn[turn.parent]
            line.extend(turn.new_prompt_ids)
            return line
        line = _Line()
        line.extend(_prompt(turn, parent))
        self._lines.append(line)
        return line

    def _mask_of(self, turn: TurnTokens, *, has_context: bool) -> list[int]:
        num_tokens = len(turn.completion_ids)
        if turn.role in self._untrained_roles:
            self._masked[Reason.UNTRAINED_ROLE] += num_tokens
            return [0] * num_tokens
        mask = [1] * num_tokens
        if mask and not has_context:
            mask[0] = 0
            self._masked[Reason.NO_CONTEXT] += 1
        self._trained += sum(mask)
        return mask


def _prompt(turn: TurnTokens, parent: _Place) -> list[int]:
    num_kept = turn.num_kept_tokens if turn.parent else 0
    return [*parent.token_ids[:num_kept], *turn.new_prompt_ids]


def _kept_attempts(turns: Sequence[TurnTokens]) -> dict[str, int]:
    """The attempt that stands for each turn: the last committed one, else the last."""
    kept: dict[str, TurnTokens] = {}
    for turn in turns:
        before = kept.get(turn.turn)
        if before is None or turn.is_committed or not before.is_committed:
            kept[turn.turn] = turn
    return {name: turn.attempt for name, turn in kept.items()}


def _check(turn: TurnTokens) -> None:
    lengths = {len(turn.completion_ids), len(turn.logprobs), len(turn.versions)}
    if len(lengths) != 1:
        raise BrokenRecordError(f"{turn.turn} has ids, logprobs and versions of lengths {lengths}")
