"""Journal bodies: every fact, plan and observation as JSON `[name, fields]`, and back, exactly.

Owns: the closed registry of what a journal may hold. Must not know: the database.
Invariants: decode(encode(x)) == x with the same types; a number that is not finite is refused,
because JSON would turn it into "no value".
"""

import math
from typing import Any, get_args

import msgspec

from opengyre.control.commands import AnyCommand, Plan
from opengyre.control.facts import Fact
from opengyre.seams.errors import BoundaryError
from opengyre.store.observations import META, AnyObservation

JournalValue = Fact | Plan | AnyObservation

_encoder = msgspec.json.Encoder()
_pair = msgspec.json.Decoder(tuple[str, msgspec.Raw])
_commands = {one.__name__: msgspec.json.Decoder(one) for one in get_args(AnyCommand)}
_values = {
    one.__name__: msgspec.json.Decoder(one) for one in (*get_args(Fact), *get_args(AnyObservation))
}
_facts = get_args(Fact)


class _PlanBody(msgspec.Struct, frozen=True, kw_only=True):
    commands: list[tuple[str, msgspec.Raw]]
    waiting_for: tuple[str, ...]


_plan = msgspec.json.Decoder(_PlanBody)


def kind_of(value: JournalValue) -> str:
    """The journal's `kind` column: fact, plan, observation or meta."""
    if isinstance(value, Plan):
        return "plan"
    if isinstance(value, META):
        return "meta"
    return "fact" if isinstance(value, _facts) else "observation"


def encode(value: JournalValue) -> bytes:
    """Raises BoundaryError("journal") for a type outside the registry or a non-finite number."""
    name = type(value).__name__
    if isinstance(value, Plan):
        commands = [(type(one).__name__, one) for one in value.commands]
        body: Any = {"commands": commands, "waiting_for": value.waiting_for}
    elif name in _values:
        body = value
    else:
        raise BoundaryError("journal", f"{name} is not a journal row", retryable=False)
    if not _is_finite(msgspec.to_builtins(body)):
        raise BoundaryError("journal", f"{name} holds a non-finite number", retryable=False)
    return _encoder.encode((name, body))


def decode(body: bytes) -> JournalValue:
    """Raises BoundaryError("journal") for an unknown name or a malformed body."""
    try:
        name, raw = _pair.decode(body)
        if name == "Plan":
            return _decode_plan(raw)
        value: JournalValue = _values[name].decode(raw)
        return value
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        head = body[:60].decode(errors="replace")
        reason = f"cannot read the row {head!r}: {error}"
        raise BoundaryError("journal", reason, retryable=False) from error


def _decode_plan(raw: msgspec.Raw) -> Plan:
    plan = _plan.decode(raw)
    commands = tuple(_commands[name].decode(body) for name, body in plan.commands)
    return Plan(commands=commands, waiting_for=plan.waiting_for)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return True
