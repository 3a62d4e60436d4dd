"""Which histories are the same: keys of message lists that ignore what carries no meaning.

Must not know: turns, tokens. Invariants: equal keys for messages that differ only in ids, in
null/""/absent content, in how tool arguments are written (key order, blanks, escapes, 5000.0 for
5000) or in reasoning, which harnesses drop or trim and which is compared on its own.
"""

import json
from collections.abc import Sequence
from typing import Any

from opengyre.gateway.body import digest
from opengyre.gateway.request import Call, Message, Tool


def root_key(tools: Sequence[Tool]) -> bytes:
    """Tools stand in the prompt before every message."""
    return digest(list(tools))


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a history that goes on with `message`."""
    calls = [_call_value(call) for call in message.calls]
    return digest([key.hex(), message.role.value, message.text, calls])


def history_keys(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Key k is that of the first k messages; len(messages) + 1 keys."""
    keys = [root_key(tools)]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def is_same_call(one: Call, other: Call) -> bool:
    """Equal as values, whatever their ids."""
    return digest(_call_value(one)) == digest(_call_value(other))


def is_same_reasoning(sent_back: str | None, known: str | None) -> bool:
    """True also when the harness does not send reasoning back at all."""
    return not (sent_back or "").strip() or (sent_back or "").strip() == (known or "").strip()


def _call_value(call: Call) -> list[Any]:
    return [call.name, _parsed(call.arguments)]


def _parsed(arguments: str) -> list[Any]:
    """The value of a call's arguments; the string itself when it is not JSON."""
    try:
        return ["json", _plain(json.loads(arguments or "{}"))]
    except (ValueError, RecursionError):
        return ["text", arguments]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, float | int) and not isinstance(value, bool):
        return repr(value) if abs(value) >= 2**53 else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
