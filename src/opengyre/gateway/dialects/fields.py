"""Fields of a request's body, read strictly: for every dialect.

Must not know: any protocol's names. Invariant: what is malformed is refused, naming the field.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from opengyre.gateway.request import Refusal

UNSEEN_IMAGE = "[an image, which this model cannot see]"
_MAX_STOPS = 16
_json = msgspec.json.Encoder()


def refused(param: str, message: str) -> Refusal:
    return Refusal(message, param=param)


def check_only(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises Refusal for a field whose value is not among those that change nothing."""
    for name, values in allowed.items():
        if body.get(name) not in values:
            raise refused(name, f"{name}={body[name]!r} is not supported here")


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise refused(name, f"{name} must be of type {kind.__name__}")
    return value


def number(body: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise refused(name, f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def integer(body: Mapping[str, Any], name: str, *, low: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise refused(name, f"{name} must be an integer of at least {low}")
    return value


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings: none, one, or a list."""
    value = body.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    is_fine = isinstance(found, list) and len(found) <= _MAX_STOPS
    if not is_fine or not all(isinstance(stop, str) and stop for stop in found):
        raise refused(name, f"{name} must be at most {_MAX_STOPS} non-empty strings")
    return tuple(found)


def openai_error_json(refusal: Refusal) -> bytes:
    """The error shape of both of OpenAI's protocols."""
    error = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param or None,
        "code": refusal.code or None,
    }
    return _json.encode({"error": error})
