"""The text of one call that writes each argument between tags, read as JSON as it is written.

Owns: where values begin and end, and their JSON. Must not know: tokens, markers, answers.
Invariants: a text keeps every character that stands between its tags (its format's own line
breaks excepted), which `renderers` would strip; a value in JSON stays as it was written;
increments join to the same however the text was split; nothing given out is taken back.

What is a text is told by the tool's schema. Without one, or where it allows more, a value is what
it can be read as, and a text if it cannot.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from opengyre.gateway.rendering.families import Tags
from opengyre.gateway.request import Tool

_MAX_HEAD_CHARS = 4096
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates in Python write them


class TaggedCall:
    """Feeds on the text of a block; the arguments come as one JSON object."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]) -> None:
        self.name = ""
        self._tags = tags
        self._tools = tools
        self._schemas: dict[str, Any] = {}
        self._text = ""  # not read yet
        self._key: str | None = None  # of the value being read
        self._is_text = False
        self._is_fresh = False  # nothing of the value was read yet
        self._num_values = 0

    @property
    def is_begun(self) -> bool:
        return bool(self.name)

    def feed(self, text: str) -> str:
        """The increment of the arguments."""
        self._text += text
        if not self.name and not self._read_head():
            return ""
        given = []
        while (part := self._next()) is not None:
            given.append(part)
        return "".join(given) + self._release()

    def close(self, *, is_whole: bool) -> str:
        """The block is over. A value that was not closed stays open, so that it is seen."""
        if not self.name:
            return ""
        if self._key is not None:
            return _escaped(self._text) if self._is_text else self._text
        end = "}" if is_whole else ""
        return end if self._num_values else "{" + end

    def _next(self) -> str | None:
        return self._read_key() if self._key is None else self._read_value()

    def _read_head(self) -> bool:
        if len(self._text) > _MAX_HEAD_CHARS:
            return False
        found = self._tags.head.match(self._text)
        if found is None:
            return False
        self.name, self._text = found["name"], self._text[found.end() :]
        self._schemas = _schemas(self._tools, self.name)
        return True

    def _read_key(self) -> str | None:
        found = self._tags.key.search(self._text)
        if found is None:
            return None
        self._key, self._text = found["key"], self._text[found.end() :]
        self._is_text = _is_text(self._schemas.get(self._key))
        self._is_fresh = self._tags.has_lines
        before = ", " if self._num_values else "{"
        self._num_values += 1
        return f"{before}{json.dumps(self._key, ensure_ascii=False)}: " + '"' * self._is_text

    def _read_value(self) -> str | None:
        self._drop_first_line_break()
        at = self._text.find(self._tags.close)
        if at < 0:
            return None
        value, self._text = self._text[:at], self._text[at + len(self._tags.close) :]
        if self._tags.has_lines:
            value = value.removesuffix("\n")
        key, self._key = self._key or "", None
        return _escaped(value) + '"' if self._is_text else _json_of(value, self._schemas.get(key))

    def _drop_first_line_break(self) -> None:
        if self._is_fresh and self._text:
            self._text = self._text.removeprefix("\n")
            self._is_fresh = False

    def _release(self) -> str:
        """What of a text may be given out: all but what may be the tag that closes it."""
        if self._key is None or not self._is_text:
            return ""
        close = "\n" * self._tags.has_lines + self._tags.close
        held = max(_num_begun(self._text, close), _num_begun(self._text, self._tags.close))
        cut = len(self._text) - held
        shown, self._text = self._text[:cut], self._text[cut:]
        return _escaped(shown)


def read_tagged(text: str, tags: Tags, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """(name, arguments) of each call of a block that holds several, each closed by `tags.end`."""
    calls = []
    *blocks, rest = text.split(tags.end)
    for number, block in enumerate([*blocks, rest]):
        call = TaggedCall(tags, tools)
        arguments = call.feed(block) + call.close(is_whole=number < len(blocks))
        if call.name:
            calls.append((call.name, arguments))
    return calls


def _num_begun(text: str, close: str) -> int:
    return next((n for n in range(len(close) - 1, 0, -1) if text.endswith(close[:n])), 0)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, schema: Any) -> str:
    stripped = text.strip()
    if schema is not None and stripped in _WORDS:
        return _WORDS[stripped]
    if stripped != "null" and _types(schema) == {"string", "null"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        msgspec.json.decode(stripped)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _is_text(schema: Any) -> bool:
    return _types(schema) == {"string"}


def _types(schema: Any) -> set[str]:
    """The types that a schema or its branches allow; none if they do not say."""
    if not isinstance(schema, dict):
        return set()
    branches = schema.get("anyOf") or schema.get("oneOf")
    told: list[Any] = []
    for one in [schema, *(branches if isinstance(branches, list) else [])]:
        kind = one.get("type") if isinstance(one, dict) else None
        told += kind if isinstance(kind, list) else [kind]
    return {kind for kind in told if isinstance(kind, str)}


def _schemas(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            return found if isinstance(found, dict) else {}
    return {}
