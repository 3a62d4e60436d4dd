"""What kind of call this is, by what its harness shows on the wire.

Owns: how a rule is tried. Must not know: harnesses by name; rules come from their profiles.
Invariant: the first rule whose conditions all hold names the role; without one a call is `main`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from opengyre.gateway.request import Message, Request, Role

MAIN = "main"
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_MAX_SEARCHED_CHARS = 65_536
_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One of `header` (lower case), `field` (dotted path in the body) or `text` (`system` or
    `last_user`) must be there, match `pattern` (a search), or be empty."""

    header: str = ""
    field: str = ""
    text: str = ""
    pattern: re.Pattern[str] | None = None
    is_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    role: str
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What rules look at: `header(name)` is "" for one that was not sent."""

    header: Callable[[str], str]
    body: dict[str, Any]
    request: Request


def role_of(evidence: Evidence, rules: Sequence[LabelRule]) -> str:
    for rule in rules:
        if all(_holds(condition, evidence) for condition in rule.conditions):
            return rule.role
    return MAIN


def _holds(condition: Condition, evidence: Evidence) -> bool:
    value = _value(condition, evidence)
    if condition.is_empty or condition.pattern is None:
        return condition.is_empty == (value in _EMPTY)
    text = value if isinstance(value, str) else _json.encode(value).decode()
    return condition.pattern.search(text[:_MAX_SEARCHED_CHARS]) is not None


def _value(condition: Condition, evidence: Evidence) -> Any:
    if condition.header:
        return evidence.header(condition.header)
    if condition.text:
        return _text(condition.text, evidence.request.messages)
    value: Any = evidence.body
    for name in condition.field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text(which: str, messages: Sequence[Message]) -> str:
    if which == "system":
        return "\n".join(one.text for one in messages if one.role is Role.SYSTEM)
    return next((one.text for one in reversed(messages) if one.role is Role.USER), "")
