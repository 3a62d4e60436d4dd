"""Which histories are the same: keys of message lists that ignore what carries no meaning.

Must not know: turns, tokens. Invariants: equal keys for messages that differ only in ids, in
null/""/absent content, in how tool arguments are written (key order, blanks, escapes, 5000.0 for
5000, a default of the tool's schema that is there or not) or in reasoning, which harnesses drop or
trim and which is compared on its own. Arguments that are not strict JSON are equal only as strings.
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


class Keys:
    """Keys of histories after the same tools, which stand in the prompt before every message."""

    __slots__ = ("_defaults_by_tool", "root")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.root = digest(list(tools))
        self._defaults_by_tool = {
            name: defaults for name, defaults in map(_defaults, tools) if defaults
        }

    def next(self, key: bytes, message: Message) -> bytes:
        """The key of a history that goes on with `message`."""
        text = message.text.encode()
        so_far = hashlib.blake2b(key, digest_size=16)
        so_far.update(f"{message.role} {len(text)} ".encode())
        so_far.update(text)
        if message.calls:
            so_far.update(canonical([self._value(call) for call in message.calls]))
        return so_far.digest()

    def all(self, messages: Sequence[Message]) -> list[bytes]:
        """Key k is that of the first k messages; len(messages) + 1 keys."""
        keys = [self.root]
        for message in messages:
            keys.append(self.next(keys[-1], message))
        return keys

    def is_same_message(self, one: Message, other: Message) -> bool:
        return self.next(b"", one) == self.next(b"", other)

    def is_same_call(self, one: Call, other: Call) -> bool:
        """Equal as values, whatever their ids."""
        return self._value(one) == self._value(other)

    def _value(self, call: Call) -> tuple[str, str, Any]:
        """Its name and the canonical JSON of its arguments; these as they are if not JSON."""
        arguments = call.arguments or "{}"
        try:
            whole = mended(arguments.encode()) if "\\u" in arguments else arguments
            value = self._without_defaults(call.name, _arguments.decode(whole))
            return call.name, "json", msgspec.Raw(canonical(value))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return call.name, "text", call.arguments

    def _without_defaults(self, tool: str, value: Any) -> Any:
        defaults = self._defaults_by_tool.get(tool)
        if defaults is None or not isinstance(value, dict):
            return value
        return {
            name: member
            for name, member in value.items()
            if name not in defaults or canonical(member) != defaults[name]
        }


def call_key(raw: dict[str, Any], history_key: bytes) -> bytes:
    """The key of a whole call: its history and all else that its body says, in any order."""
    rest = {name: value for name, value in raw.items() if name not in _HISTORY_FIELDS}
    return hashlib.blake2b(history_key + canonical(rest), digest_size=16).digest()


def is_same_reasoning(sent_back: str | None, known: str | None) -> bool:
    """True also when the harness does not send reasoning back at all."""
    return not (sent_back or "").strip() or (sent_back or "").strip() == (known or "").strip()


def _defaults(tool: Tool) -> tuple[str, dict[str, bytes]]:
    """A tool's name and the members of its arguments that may as well be left out, with the value
    that they have then: harnesses write them in."""
    function = tool.get("function", {})
    schema = function.get("parameters")
    members = schema.get("properties") if isinstance(schema, dict) else None
    found = {
        name: canonical(member["default"])
        for name, member in (members.items() if isinstance(members, dict) else ())
        if isinstance(member, dict) and "default" in member
    }
    return str(function.get("name", "")), found


def _number(text: str) -> float | int:
    """Readers see no difference between 5000.0, 5e3 and 5000. Raises ValueError for 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


_arguments = msgspec.json.Decoder(float_hook=_number)
