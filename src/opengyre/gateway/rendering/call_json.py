"""The text of one JSON call, `{"name": ..., "arguments": ...}`, read as it is written.

Owns: where the arguments begin and end. Must not know: tokens, markers, answers. Invariants:
nothing is repaired and nothing given out is taken back, so the first `name` and the first
`arguments` count and what follows them is not read; arguments are given exactly as written, or,
if they are a JSON string, as the text it holds; increments join to the same however the text was
split. What the arguments are is not judged: they end where their brackets do, or with the block.

Without a name there is no call. Arguments before the name wait for it. A whole object without
arguments has `{}`; a named block that broke or was cut before its arguments gives itself, stripped.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_BLANKS = frozenset(" \t\r\n")
_PLAIN = re.compile(r'[^"\\]+')
_State = Callable[[str], Any]


class JsonCall:
    """Feeds on the text of a block; `is_begun` once the name and some arguments are known.

    `member` is the one that has the arguments.
    """

    def __init__(self, member: str = "arguments") -> None:
        self.name = ""
        self._member = member
        self._raw: list[str] = []
        self._state: _State = self._before
        self._key = ""
        self._string: list[str] = []  # source of the string being read
        self._is_escaped = False
        self._is_quoted = False  # inside a string inside a value
        self._depth = 0
        self._is_arguments = False  # the value being read is
        self._has_arguments = False
        self._is_whole = False
        self._arguments: list[str] = []  # not given out yet

    @property
    def is_begun(self) -> bool:
        return bool(self.name) and self._has_arguments

    def feed(self, text: str) -> str:
        """The increment of the arguments."""
        self._raw.append(text)
        at = 0
        while at < len(text):
            if self._is_quoted and not self._is_escaped:
                end = _after_plain(text, at)
                if self._is_arguments:
                    self._arguments.append(text[at:end])
                at = end
            if at < len(text):
                self._state = self._state(text[at])
                at += 1
        return self._take()

    def close(self, *, is_whole: bool) -> str:
        """The block is over: what is left of the arguments. No call if `name` is empty."""
        if self._state == self._in_text and self._is_arguments:
            self._arguments = self._string
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments = ["{}" if is_whole and self._is_whole else "".join(self._raw).strip()]
        return self._take()

    def _take(self) -> str:
        if not self.is_begun:
            return ""
        text = "".join(self._arguments)
        self._arguments = []
        return text

    def _before(self, char: str) -> _State:
        if char == "{":
            return self._first_key
        return self._before if char in _BLANKS else self._broken

    def _first_key(self, char: str) -> _State:
        if char in _BLANKS:
            return self._first_key
        return self._after(char) if char == "}" else self._next_key(char)

    def _next_key(self, char: str) -> _State:
        if char == '"':
            self._string = [char]
            return self._in_key
        return self._next_key if char in _BLANKS else self._broken

    def _in_key(self, char: str) -> _State:
        if not self._ends_string(char):
            return self._in_key
        self._key = _text_of(self._string) or ""
        return self._colon

    def _colon(self, char: str) -> _State:
        if char == ":":
            return self._value
        return self._colon if char in _BLANKS else self._broken

    def _value(self, char: str) -> _State:
        if char in _BLANKS:
            return self._value
        if char in ",:}]":
            return self._broken
        self._is_arguments = self._key == self._member and not self._has_arguments
        self._has_arguments |= self._is_arguments
        if char == '"':
            self._string = [char]
            return self._in_text
        self._depth, self._is_quoted = 0, False
        return self._in_value(char)

    def _in_text(self, char: str) -> _State:
        if not self._ends_string(char):
            return self._in_text
        text = _text_of(self._string)
        if self._is_arguments:
            self._arguments = self._string if text is None else [text]
        elif self._key == "name" and not self.name:
            self.name = text or ""
        return self._after

    def _in_value(self, char: str) -> _State:
        is_bare = self._depth == 0 and not self._is_quoted
        if is_bare and (char in _BLANKS or char in ",}]"):
            return self._after(char)
        if self._is_arguments:
            self._arguments.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_quoted:
            self._is_escaped = char == "\\"
            self._is_quoted = char != '"'
        elif char == '"':
            self._is_quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._in_value if self._depth else self._after
        return self._in_value

    def _after(self, char: str) -> _State:
        if char == ",":
            return self._next_key
        if char == "}":
            self._is_whole = True
            return self._end
        return self._after if char in _BLANKS else self._broken

    def _end(self, char: str) -> _State:
        return self._end if char in _BLANKS else self._broken(char)

    def _broken(self, _: str) -> _State:
        self._is_whole = False
        return self._broken

    def _ends_string(self, char: str) -> bool:
        self._string.append(char)
        if self._is_escaped:
            self._is_escaped = False
            return False
        self._is_escaped = char == "\\"
        return char == '"'


def _after_plain(text: str, at: int) -> int:
    """Where the run ends that neither ends a string nor escapes."""
    match = _PLAIN.match(text, at)
    return at if match is None else match.end()


def _text_of(source: list[str]) -> str | None:
    """What a JSON string says; None if it says nothing that can be sent on."""
    try:
        text = str(json.loads("".join(source)))
        text.encode()
    except ValueError:  # also a lone surrogate
        return None
    return text
