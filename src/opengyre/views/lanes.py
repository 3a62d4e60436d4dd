"""Where each device's seconds went, as stretches on a time line.

Owns: stretches, laying measured ones over assumed ones, totals. Must not know: journals, colours.
Invariant: the stretches of one engine never overlap, so totals add up to the time covered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from opengyre.store.observations import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """[start_s, end_s) of one engine in one activity."""

    activity: Activity
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def extend(stretches: list[Stretch], activity: Activity, start_s: float, end_s: float) -> None:
    """Append, joining with the last stretch if that is the same activity without a gap."""
    if end_s <= start_s:
        return
    last = stretches[-1] if stretches else None
    if last is not None and last.activity is activity and last.end_s == start_s:
        stretches[-1] = replace(last, end_s=end_s)
    else:
        stretches.append(Stretch(activity=activity, start_s=start_s, end_s=end_s))


def overlay(
    base: Sequence[Stretch], measured: Iterable[Stretch], *, over: frozenset[Activity] | None = None
) -> list[Stretch]:
    """`base` with `measured` laid over it, only where `base` has a stretch (of an activity in
    `over`, if given). The covered time stays the same."""
    spans = _merged(measured)
    result: list[Stretch] = []
    first = 0
    for stretch in base:
        while first < len(spans) and spans[first].end_s <= stretch.start_s:
            first += 1
        if over is not None and stretch.activity not in over:
            extend(result, stretch.activity, stretch.start_s, stretch.end_s)
        else:
            _cut(result, stretch, spans, first)
    return result


def totals(lanes: Iterable[Sequence[Stretch]]) -> dict[str, float]:
    """Device-seconds by activity over all lanes; every activity is named."""
    seconds = dict.fromkeys(Activity, 0.0)
    for lane in lanes:
        for stretch in lane:
            seconds[stretch.activity] += stretch.length_s
    return {activity.value: value for activity, value in seconds.items()}


def _cut(result: list[Stretch], stretch: Stretch, spans: list[Stretch], first: int) -> None:
    at_s = stretch.start_s
    for span in spans[first:]:
        if span.start_s >= stretch.end_s:
            break
        start_s, end_s = max(at_s, span.start_s), min(stretch.end_s, span.end_s)
        extend(result, stretch.activity, at_s, start_s)
        extend(result, span.activity, start_s, end_s)
        at_s = max(at_s, end_s)
    extend(result, stretch.activity, at_s, stretch.end_s)


def _merged(measured: Iterable[Stretch]) -> list[Stretch]:
    """Sorted and without overlap: an earlier stretch keeps what a later one also claims."""
    merged: list[Stretch] = []
    for span in sorted(measured, key=lambda one: (one.start_s, one.end_s)):
        start_s = max(span.start_s, merged[-1].end_s) if merged else span.start_s
        if start_s < span.end_s:
            merged.append(replace(span, start_s=start_s))
    return merged
