"""The text of an answer as its client may see it now: trimmed, and cut at a stop string.

Must not know: tokens. Invariants: what was given out is never taken back; all increments join to
the stripped text up to the first stop string, without the label it may begin with.
"""


class VisibleText:
    """Holds back blanks that may be the end, and what may begin a stop string.

    `stop` is the stop string it came to, or ""; `rest` then the text from before it that was not
    given out, and on. `label` is dropped if the text begins with it.
    """

    __slots__ = ("_has_begun", "_held", "_label", "_stops", "rest", "stop")

    def __init__(
        self, stops: tuple[str, ...] = (), *, label: str = "", has_begun: bool = False
    ) -> None:
        self._stops = stops
        self._label = label
        self._held = ""
        self._has_begun = has_begun
        self.stop = ""
        self.rest = ""

    def feed(self, text: str) -> str:
        """The increment that may be shown now."""
        if self.stop or not text:
            return ""
        held = self._held + text
        if self._label:
            held = self._without_label(held)
        hits = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            at, self.stop = min(hits)
            shown = held[:at].rstrip()
            self._held, self.rest = "", held[len(shown) :]
            return self._begin(shown)
        cut = len(held) - self._num_maybe_stop(held)
        shown = "" if self._label else held[:cut].rstrip()
        self._held = held[len(shown) :]
        return self._begin(shown)

    def flush(self) -> str:
        """The end of the text: blanks are dropped, half of a stop string is text."""
        held, self._held = self._held.rstrip(), ""
        if self._label and held.lstrip() == self._label:
            return ""
        return self._begin(held)

    def _without_label(self, held: str) -> str:
        """While `_label` is set the text may still begin with it, and is held."""
        begun = held.lstrip()
        if begun.startswith(self._label):
            held = begun[len(self._label) :]
        elif self._label.startswith(begun):
            return held
        self._label = ""
        return held

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
