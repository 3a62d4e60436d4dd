"""How many calls of an answer can be read, how many cannot, and how many are watched.

Must not know: families, dialects, what the pattern is of. Invariants: each call that was begun and
ended counts once, as read or as malformed; what a turn's cut left open is the cut's fault, not the
model's; at most the first MAX_SEARCHED_CHARS of a call's arguments are searched.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from opengyre.gateway.request import Call

MAX_SEARCHED_CHARS = 65_536
_LINE_BREAKS = re.compile(r"\\[nrt]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCall:
    """`call` None: it never got a name. `is_closed`: its end was sampled, by the format's own
    mark; not closed, it ended with the answer."""

    call: Call | None
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCounts:
    """`num_watched` are among the `num_read`."""

    num_read: int
    num_malformed: int
    num_watched: int


def watched_regex(pattern: str) -> re.Pattern[str] | None:
    """None for "", which watches nothing."""
    return re.compile(pattern) if pattern else None


def count_calls(
    begun: Iterable[BegunCall], *, is_cut: bool, watched: re.Pattern[str] | None
) -> CallCounts:
    """Of an answer that began these. `is_cut`: by its length, its client or an error."""
    num_read = num_malformed = num_watched = 0
    for one in begun:
        if one.call is not None and _is_object(one.call.arguments):
            num_read += 1
            num_watched += watched is not None and _is_watched(one.call.arguments, watched)
        elif one.is_closed or not is_cut:
            num_malformed += 1
    return CallCounts(num_read=num_read, num_malformed=num_malformed, num_watched=num_watched)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def _is_watched(arguments: str, watched: re.Pattern[str]) -> bool:
    """JSON spells a line break with a letter, which must not look like part of a word."""
    text = _LINE_BREAKS.sub(" ", arguments[:MAX_SEARCHED_CHARS])
    return watched.search(text) is not None
