"""The text of an answer as its client may see it now: trimmed, and cut at a stop string.

Must not know: tokens. Invariants: what was given out is never taken back; all increments join to
the stripped text up to the first stop string.
"""


class VisibleText:
    """Holds back blanks that may be the end, and what may begin a stop string."""

    __slots__ = ("_has_begun", "_held", "_stops", "stop")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._held = ""
        self._has_begun = False
        self.stop = ""

    @property
    def is_stopped(self) -> bool:
        return bool(self.stop)

    def feed(self, text: str) -> str:
        """The increment that may be shown now."""
        if self.is_stopped or not text:
            return ""
        held = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            at, self.stop = min(hits)
            self._held = ""
            return self._begin(held[:at].rstrip())
        cut = len(held) - self._num_maybe_stop(held)
        shown = held[:cut].rstrip()
        self._held = held[len(shown) :]
        return self._begin(shown)

    def flush(self) -> str:
        """The end of the text: blanks are dropped, half of a stop string is text."""
        shown, self._held = self._begin(self._held.rstrip()), ""
        return shown

    def _begin(self, text: str) -> str:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return text

    def _num_maybe_stop(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
