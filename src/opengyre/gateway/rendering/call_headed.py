"""The text of one call whose arguments follow a head that names it, read as it is written.

Owns: where the head and the arguments end. Must not know: tokens, markers, answers. Invariants:
arguments are given exactly as written, without blanks around them and without what closes them;
increments join to the same however the text was split; nothing given out is taken back.
"""

from opengyre.gateway.rendering.families import Headed
from opengyre.gateway.rendering.visible import VisibleText

_MAX_HEAD_CHARS = 4096


class HeadedCall:
    """Feeds on the text of a block. `name` is "" until the head is whole."""

    def __init__(self, headed: Headed) -> None:
        self.name = ""
        self._head = headed.head
        self._text = ""
        self._arguments = VisibleText((headed.end,) if headed.end else ())
        self._is_empty = True

    @property
    def is_begun(self) -> bool:
        return bool(self.name)

    def feed(self, text: str) -> str:
        """The increment of the arguments."""
        if self.name:
            return self._give(self._arguments.feed(text))
        if len(self._text) > _MAX_HEAD_CHARS:
            return ""
        self._text += text
        found = self._head.match(self._text)
        if found is None:
            return ""
        self.name = found["name"]
        return self._give(self._arguments.feed(self._text[found.end() :]))

    def close(self, *, is_whole: bool) -> str:
        """The block is over: what is left of the arguments. No call if `name` is empty."""
        if not self.name:
            return ""
        rest = self._give(self._arguments.flush())
        return "{}" if self._is_empty and is_whole else rest

    def _give(self, text: str) -> str:
        self._is_empty &= not text
        return text
