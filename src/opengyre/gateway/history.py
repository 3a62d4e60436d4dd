"""Which histories are the same: keys of message lists that ignore what carries no meaning.

Must not know: turns, tokens. Invariants: equal keys for messages that differ only in ids, in
null/""/absent content, in how tool arguments are written (key order, blanks, escapes, 5000.0 for
5000) or in reasoning, which harnesses drop or trim and which is compared on its own. Arguments
that are not strict JSON are equal only as strings.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from opengyre.gateway.body import canonical, digest, mended
from opengyre.gateway.request import Call, Message, Tool

_HISTORY_FIELDS = {"messages", "input", "system", "instructions", "tools"}
_MAX_WHOLE = 1e21  # from here on JavaScript writes whole numbers with an exponent too


def root_key(tools: Sequence[Tool]) -> bytes:
    """Tools stand in the prompt before every message."""
    return digest(list(tools))


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a history that goes on with `message`."""
    text = message.text.encode(errors="surrogatepass")
    calls = [_call_value(call) for call in message.calls]
    rest = canonical((message.role, len(text), calls))
    return hashlib.blake2b(b"".join((key, rest, text)), digest_size=16).digest()


def history_keys(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Key k is that of the first k messages; len(messages) + 1 keys."""
    keys = [root_key(tools)]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def call_key(raw: dict[str, Any], history_key: bytes) -> bytes:
    """The key of a whole call: its history and all else that its body says, in any order."""
    rest = {name: value for name, value in raw.items() if name not in _HISTORY_FIELDS}
    return hashlib.blake2b(history_key + canonical(rest), digest_size=16).digest()


def is_same_call(one: Call, other: Call) -> bool:
    """Equal as values, whatever their ids."""
    return _call_value(one) == _call_value(other)


def is_same_reasoning(sent_back: str | None, known: str | None) -> bool:
    """True also when the harness does not send reasoning back at all."""
    return not (sent_back or "").strip() or (sent_back or "").strip() == (known or "").strip()


def _call_value(call: Call) -> tuple[str, str, Any]:
    """Its name and the canonical JSON of its arguments; these as they are if not JSON."""
    arguments = call.arguments or "{}"
    try:
        value = _arguments.decode(mended(arguments.encode()) if "\\u" in arguments else arguments)
        return call.name, "json", msgspec.Raw(canonical(value))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return call.name, "text", call.arguments


def _number(text: str) -> float | int:
    """Readers see no difference between 5000.0, 5e3 and 5000. Raises ValueError for 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


_arguments = msgspec.json.Decoder(float_hook=_number)
