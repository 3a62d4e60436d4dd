"""Where every sampled token of an execution ended: trained, masked or dropped, and why.

Owns: the reasons. Must not know trees or groups. Invariant (P11): trained + masked + dropped =
sampled. Masked: the execution takes part in its group's update, this token does not; dropped: it
does not take part.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a sampled token is not trained."""

    NOT_COMMITTED = "not_committed"
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    RELAUNCHED = "relaunched"
    UNTRAINED_ROLE = "untrained_role"
    NO_CONTEXT = "no_context"
    NOT_SELECTED = "not_selected"
    NO_VARIANCE = "no_variance"
    TRUNCATED = "truncated"
    OVERLONG = "overlong"
    NO_VERDICT = "no_verdict"
    NO_SHAPED_REWARD = "no_shaped_reward"
    UNREADABLE = "unreadable"
    NOT_APPLIED = "not_applied"
    VOID_GROUP = "void_group"
    FILTERED_GROUP = "filtered_group"
    EVALUATION = "evaluation"
    NOT_CONSUMED = "not_consumed"


DROPPING = frozenset({Reason.NOT_COMMITTED, Reason.SUPERSEDED_ATTEMPT, Reason.RELAUNCHED})
"""Reasons of a turn that drop its tokens; the other reasons of a turn mask them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Of some executions; `masked` and `dropped` by Reason."""

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


def drop_all(account: TokenAccount, reason: Reason) -> TokenAccount:
    """The account after nothing of these executions is trained."""
    lost = account.trained + sum(account.masked.values())
    dropped = Counter(account.dropped) + Counter({str(reason): lost})
    return TokenAccount(sampled=account.sampled, dropped=dict(dropped))


def mask_trained(account: TokenAccount, reason: Reason) -> TokenAccount:
    """The account after what would have been trained is masked."""
    if not account.trained:
        return account
    masked = Counter(account.masked) + Counter({str(reason): account.trained})
    return TokenAccount(sampled=account.sampled, masked=dict(masked), dropped=account.dropped)
