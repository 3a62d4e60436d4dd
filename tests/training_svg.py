"""One step as a picture: what each stage of each cell did, over time.

Owns: the layout, and reading a picture back. Must not know where spans come from. Invariant: every
span is in the picture with its exact words, so that the picture can be checked.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree import ElementTree

WIDTH = 1180
LEFT = 96
TOP = 84
ROW = 24
BOX = 20
BETWEEN = 16
INK = "#222222"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Kind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    REST = "rest"
    PULL = "pull"
    SETTLE = "settle"
    REDUCE = "reduce"
    UPDATE = "update"
    READY = "ready"
    CLOSED = "closed"


COLOURS = {
    Kind.FORWARD: "#9ecae1",
    Kind.BACKWARD: "#3182bd",
    Kind.REST: "#eeeeee",
    Kind.PULL: "#e6ab02",
    Kind.SETTLE: "#66a61e",
    Kind.REDUCE: "#e7298a",
    Kind.UPDATE: "#7570b3",
}
LEGEND = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.REST: "nothing in flight, at rest",
    Kind.PULL: "joining: pull of the snapshot",
    Kind.SETTLE: "settle",
    Kind.REDUCE: "reduce",
    Kind.UPDATE: "update",
}
TITLE = re.compile(r"c(-?\d+) stage (\d+) (\w+) (-?\d+) \((\d+) tokens\) ([\d.]+) to ([\d.]+) s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`number` is that of the micro-step (FORWARD, BACKWARD) or of the group (READY); `cell` is -1
    for what is of no cell. [begin_s, end_s] since the step was opened."""

    kind: Kind
    cell: int = -1
    stage: int = 0
    number: int = -1
    num_tokens: int = 0
    begin_s: float
    end_s: float

    @property
    def title(self) -> str:
        return (
            f"c{self.cell} stage {self.stage} {self.kind} {self.number} "
            f"({self.num_tokens} tokens) {self.begin_s:.4f} to {self.end_s:.4f} s"
        )


def spans_of(svg: str) -> list[Span]:
    """What `svg_of` drew."""
    root = ElementTree.fromstring(svg)
    told = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    return [_span(match) for text in told if (match := TITLE.fullmatch(text))]


def _span(match: re.Match[str]) -> Span:
    cell, stage, kind, number, num_tokens, begin, end = match.groups()
    return Span(
        kind=Kind(kind),
        cell=int(cell),
        stage=int(stage),
        number=int(number),
        num_tokens=int(num_tokens),
        begin_s=float(begin),
        end_s=float(end),
    )


def svg_of(spans: Sequence[Span]) -> str:
    end_s = max(one.end_s for one in spans)
    scale = (WIDTH - LEFT - 20) / end_s
    rows = sorted({(one.cell, one.stage) for one in spans if one.cell >= 0})
    tops = {row: TOP + place * ROW + row[0] * BETWEEN for place, row in enumerate(rows)}
    bottom = max(tops.values()) + ROW
    height = bottom + 64
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' "
        f"width='{WIDTH}' height='{height}' {FONT} font-size='11' fill='{INK}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        *_axis(end_s, scale, bottom),
        *_marks(spans, scale, bottom),
        *_names(tops),
        *(line for one in spans if one.cell >= 0 for line in _box(one, tops, scale)),
        *_legend(height - 12),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axis(end_s: float, scale: float, bottom: int) -> Iterator[str]:
    for tenth in range(0, int(end_s * 10) + 1, 2):
        x = LEFT + tenth / 10 * scale
        yield f"<path d='M{x:.1f} {bottom}v4' stroke='{INK}'/>"
        yield f"<text x='{x:.1f}' y='{bottom + 16}' text-anchor='middle'>{tenth / 10:g} s</text>"


def _marks(spans: Iterable[Span], scale: float, bottom: int) -> Iterator[str]:
    """What happens to the stream: groups that get ready, and the end of the window."""
    yield f"<text x='8' y='{TOP - 52}'>ready</text>"
    free_from = 0.0
    for one in (one for one in spans if one.stage == 0):
        x = LEFT + one.begin_s * scale
        match one.kind:
            case Kind.READY:
                at = max(x + 2, free_from)
                free_from = at + 22
                yield f"<g><title>{one.title}</title>"
                yield f"<path d='M{x:.1f} {TOP - 46}V{bottom}' stroke='#cccccc'/>"
                yield f"<text x='{at:.1f}' y='{TOP - 52}'>g{one.number}</text></g>"
            case Kind.CLOSED:
                yield f"<g><title>{one.title}</title>"
                yield (
                    f"<path d='M{x:.1f} {TOP - 26}V{bottom}' stroke='#d62728' "
                    "stroke-dasharray='4 3'/>"
                )
                yield (
                    f"<text x='{x - 4:.1f}' y='{TOP - 18}' text-anchor='end' fill='#d62728'>"
                    "all groups are assigned: the window closes</text></g>"
                )
            case Kind.PULL:
                yield f"<text x='{x:.1f}' y='{TOP - 34}'>cell {one.cell} joins</text>"
            case Kind.UPDATE:
                where = f"x='{x + 8:.1f}' y='{TOP - 34}' text-anchor='end'"
                yield f"<text {where}>reduce, update</text>"
            case _:
                continue


def _names(tops: dict[tuple[int, int], int]) -> Iterator[str]:
    for (cell, stage), top in tops.items():
        name = "core" if cell == 0 else f"cell {cell}"
        yield f"<text x='8' y='{top + 14}'>{name}, stage {stage}</text>"


def _box(one: Span, tops: dict[tuple[int, int], int], scale: float) -> Iterator[str]:
    x, y = LEFT + one.begin_s * scale, tops[one.cell, one.stage]
    width = max(2.5, (one.end_s - one.begin_s) * scale)
    is_step = one.kind in (Kind.FORWARD, Kind.BACKWARD)
    ink = "white" if one.kind is Kind.BACKWARD else INK
    edge = " stroke='white'" if is_step else ""
    yield f"<g><title>{one.title}</title>"
    yield (
        f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{BOX}' "
        f"fill='{COLOURS[one.kind]}'{edge}/>"
    )
    words = str(one.number) if is_step else "at rest" if one.kind is Kind.REST else ""
    if width > 8 + 4 * len(words):
        yield (
            f"<text x='{x + width / 2:.1f}' y='{y + 14}' text-anchor='middle' fill='{ink}'>"
            f"{words}</text>"
        )
    yield "</g>"


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for kind, words in LEGEND.items():
        yield f"<rect x='{x}' y='{y - 10}' width='14' height='12' fill='{COLOURS[kind]}'/>"
        yield f"<text x='{x + 19}' y='{y}'>{words}</text>"
        x += 40 + 6 * len(words)


def broken_rules(spans: Sequence[Span], *, num_stages: int) -> list[str]:
    """What the picture shows and must not, in words; a picture with nothing in it shows it too."""
    numbers = sorted({one.number for one in spans if one.kind is Kind.FORWARD})
    broken = [] if numbers == list(range(len(numbers))) and numbers else ["numbers have gaps"]
    for number in numbers:
        broken += _one_micro_step(number, [one for one in spans if one.number == number])
    for row in {(one.cell, one.stage) for one in spans if one.kind is Kind.FORWARD}:
        own = [one for one in spans if (one.cell, one.stage) == row]
        if _most_in_flight(own) != num_stages - row[1]:
            broken.append(f"{row}: {_most_in_flight(own)} in flight at most")
    return broken + _order_of_the_end(spans)


def _one_micro_step(number: int, told: Sequence[Span]) -> list[str]:
    """Down through the stages, and up again, in one cell."""
    way = [one for one in told if one.kind in (Kind.FORWARD, Kind.BACKWARD)]
    way.sort(key=lambda one: one.begin_s)
    stages = [(one.kind, one.stage) for one in way]
    num = len(way) // 2
    wanted = [(Kind.FORWARD, stage) for stage in range(num)]
    wanted += [(Kind.BACKWARD, stage) for stage in reversed(range(num))]
    is_one_way = stages == wanted and len({one.cell for one in way}) == 1
    return [] if is_one_way else [f"micro-step {number} went {stages}"]


def _most_in_flight(own: Sequence[Span]) -> int:
    events = [(one.begin_s, 1) for one in own if one.kind is Kind.FORWARD]
    events += [(one.end_s, -1) for one in own if one.kind is Kind.BACKWARD]
    num = most = 0
    for _, change in sorted(events):
        num += change
        most = max(most, num)
    return most


def _order_of_the_end(spans: Sequence[Span]) -> list[str]:
    """Every micro-step ends, then all settle, then all reduce, then the core updates."""

    def bounds(*kinds: Kind) -> tuple[float, float]:
        of = [one for one in spans if one.kind in kinds]
        return min(one.begin_s for one in of), max(one.end_s for one in of)

    parts = [bounds(Kind.BACKWARD), bounds(Kind.SETTLE), bounds(Kind.REDUCE), bounds(Kind.UPDATE)]
    late = [i for i in range(3) if parts[i][1] > parts[i + 1][0]]
    members = {one.cell for one in spans if one.kind is Kind.FORWARD}
    of = {k: {one.cell for one in spans if one.kind is k} for k in (Kind.SETTLE, Kind.REDUCE)}
    broken = [f"part {i} of the end is not over when the next begins" for i in late]
    return broken + [f"{kind}: {cells}" for kind, cells in of.items() if cells != members]
