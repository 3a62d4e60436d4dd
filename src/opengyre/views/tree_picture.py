"""An execution's tree as an SVG: depth in tokens to the right, branches downwards.

Owns: layout, colours, marks. Must not know: where the tree comes from. Invariants: a spine lies in
one lane; two spines share a lane only where their depths are apart; nothing is loaded to show it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from opengyre.seams.errors import ConfigError
from opengyre.store.whole_file import whole_file
from opengyre.trajectory.tree import Fork
from opengyre.trajectory.turns import Role
from opengyre.views.spines import Spine, joined, spines_of
from opengyre.views.tree_lines import header_lines, short
from opengyre.views.trees import ExecutionTree, NodeEnd

COLOURS = {
    Role.MAIN: "#0072b2",
    Role.MAIN_SUMMARY: "#009e73",
    Role.SUB_AGENT: "#d55e00",
    Role.SUB_AGENT_SUMMARY: "#cc79a7",
    Role.SIDE: "#777777",
}
WIDTH = 1360
MARGIN = 20
HEADER = 126
LANE = 34
BAR = 14
FONT = "font-family='Helvetica, Arial, sans-serif'"
CHAR = 6.2
INK = "#222222"


@dataclass(slots=True)
class _Lanes:
    """Depths that are taken in each lane."""

    taken: list[list[tuple[int, int]]] = field(default_factory=list)

    def place(self, begin: int, end: int, *, below: int, gap: int) -> int:
        """The first lane below `below` that is free from `begin` to `end`."""
        lane = below + 1
        while lane < len(self.taken) and any(
            begin - gap < high and low < end + gap for low, high in self.taken[lane]
        ):
            lane += 1
        while len(self.taken) <= lane:
            self.taken.append([])
        self.taken[lane].append((begin, end))
        return lane


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    spine: Spine
    lane: int
    parent_lane: int | None


def draw_tree(tree: ExecutionTree, path: Path) -> None:
    """Write the picture; it appears whole or not at all. Raises ConfigError."""
    try:
        with whole_file(path) as file:
            file.write(tree_svg(tree).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the picture: {error.strerror}") from error


def tree_svg(tree: ExecutionTree) -> str:
    num_tokens = max((end.node.end for end in tree.ends), default=0) or 1
    scale = (WIDTH - 2 * MARGIN) / num_tokens
    placed = _placed(spines_of(tree.ends), gap=round(60 / scale))
    num_lanes = 1 + max((one.lane for one in placed), default=0)
    height = HEADER + num_lanes * LANE + 48
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' "
        f"width='{WIDTH}' height='{height}' {FONT} font-size='11' fill='{INK}'>",
        *_patterns(),
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        *_header(tree),
        *_axis(num_tokens, scale, top=HEADER - 8, bottom=height - 38),
        *(line for one in placed for line in _spine(one, scale)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _placed(spines: Sequence[Spine], *, gap: int) -> list[_Placed]:
    """Depth first, so that branches lie close below what they leave."""
    lanes, placed = _Lanes(), list[_Placed]()
    waiting: list[tuple[Spine, int | None]] = [(one, None) for one in reversed(joined(spines))]
    while waiting:
        spine, parent_lane = waiting.pop()
        begin = min(end.node.begin for end in spine.ends)
        below = -1 if parent_lane is None else parent_lane
        lane = lanes.place(begin, spine.num_tokens, below=below, gap=gap)
        placed.append(_Placed(spine=spine, lane=lane, parent_lane=parent_lane))
        branches = joined([one for _, one in spine.branches])
        waiting += [(one, lane) for one in reversed(branches)]
    return placed


def _spine(placed: _Placed, scale: float) -> Iterator[str]:
    y = HEADER + placed.lane * LANE + 14
    if placed.parent_lane is not None:
        x = MARGIN + placed.spine.ends[0].node.begin * scale
        top = HEADER + placed.parent_lane * LANE + 14 + BAR
        yield f"<path d='M{x:.1f} {top}V{y + BAR / 2}' stroke='#aaaaaa' fill='none'/>"
    if placed.spine.is_joined:
        yield from _longest(placed.spine, y, scale)
        return
    yield from _labels(placed.spine, y, scale)
    before = 0
    for end in placed.spine.ends:
        if end.node.begin < before:
            yield _cut_mark(MARGIN + end.node.begin * scale, y)
        yield from _bar(end, y, scale)
        before = end.node.end


def _longest(spine: Spine, y: int, scale: float) -> Iterator[str]:
    """One of many single calls of a kind."""
    end = max(spine.ends, key=lambda one: len(one.node.ids))
    x, num = MARGIN + end.node.begin * scale, len(spine.ends)
    words = f"{num} times {end.node.fork.value.replace('_', ' ')}, the longest is {short(end.node)}"
    yield f"<text x='{x:.1f}' y='{y - 3}'>{escape(words)}</text>"
    yield from _bar(end, y, scale)


def _labels(spine: Spine, y: int, scale: float) -> Iterator[str]:
    """What each node is that does not simply go on, where there is room for it."""
    free_from = -1.0
    for place, end in enumerate(spine.ends):
        x = MARGIN + end.node.begin * scale
        words = f"{end.node.fork.value.replace('_', ' ')} {short(end.node)}"
        x = min(x, WIDTH - CHAR * len(words))
        is_told = place == 0 or end.node.fork is not Fork.CONTINUED
        if is_told and x > free_from:
            yield f"<text x='{x:.1f}' y='{y - 3}'>{escape(words)}</text>"
            free_from = x + CHAR * len(words)


def _bar(end: NodeEnd, y: int, scale: float) -> Iterator[str]:
    """What was injected as a thin line, what was sampled as a bar filled by what became of it."""
    node, colour = end.node, COLOURS[end.node.role]
    yield f"<g><title>{escape(_words(end))}</title>"
    x = MARGIN + node.begin * scale
    width = max(node.num_injected * scale, 0.3)
    place = f"x='{x:.2f}' y='{y + BAR / 2 - 1.5}' width='{width:.2f}' height='3'"
    yield f"<rect {place} fill='{colour}' opacity='0.35'/>"
    at = node.sampled_begin
    for begin, finish in end.trained:
        if at < begin:
            yield _rest(end, (at, begin), y, scale)
        x, width = MARGIN + begin * scale, max((finish - begin) * scale, 0.8)
        yield f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{BAR}' fill='{colour}'/>"
        at = finish
    if at < node.end:
        yield _rest(end, (at, node.end), y, scale)
    yield "</g>"


def _rest(end: NodeEnd, depths: tuple[int, int], y: int, scale: float) -> str:
    x, width = MARGIN + depths[0] * scale, max((depths[1] - depths[0]) * scale, 0.8)
    place = f"x='{x:.2f}' y='{y}' width='{width:.2f}' height='{BAR}'"
    if end.is_dropped:
        return f"<rect {place} {_dropped(end.node.role)}/>"
    return f"<rect {place} {_masked(end.node.role)}/>"


def _masked(role: Role) -> str:
    return f"fill='url(#masked-{role.value})'"


def _dropped(role: Role) -> str:
    return f"fill='white' stroke='{COLOURS[role]}' stroke-width='0.8'"


def _cut_mark(x: float, y: int) -> str:
    """Where a line was left and another goes on."""
    return f"<path d='M{x:.1f} {y - 2}v{BAR + 4}' stroke='{INK}' stroke-width='1'/>"


def _words(end: NodeEnd) -> str:
    node = end.node
    versions = sorted({span.version for span in node.spans})
    rest = f", {end.num_rest} {end.reason}" if end.num_rest else ""
    return (
        f"{node.turn} attempt {node.attempt}, {node.role.value}, {node.fork.value}: "
        f"{node.begin} kept, {node.num_injected} injected, {node.num_sampled} sampled, "
        f"{end.num_trained} trained{rest}; versions {versions}"
    )


def _patterns() -> Iterator[str]:
    yield "<defs>"
    for role, colour in COLOURS.items():
        yield (
            f"<pattern id='masked-{role.value}' width='5' height='5' "
            "patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
            f"<rect width='5' height='5' fill='{colour}' opacity='0.18'/>"
            f"<rect width='1.6' height='5' fill='{colour}' opacity='0.7'/></pattern>"
        )
    yield "</defs>"


def _header(tree: ExecutionTree) -> Iterator[str]:
    for number, line in enumerate(header_lines(tree)):
        weight = " font-weight='bold'" if number == 0 else ""
        yield f"<text x='{MARGIN}' y='{22 + 16 * number}'{weight}>{escape(line.strip())}</text>"
    x, y = MARGIN, 86
    for role, colour in COLOURS.items():
        yield f"<rect x='{x}' y='{y}' width='22' height='{BAR}' fill='{colour}'/>"
        yield f"<text x='{x + 28}' y='{y + 11}'>{role.value}</text>"
        x += 60 + round(CHAR * len(role.value))
    marks = (
        ("trained", f"fill='{INK}'"),
        ("masked", _masked(Role.SIDE)),
        ("dropped", _dropped(Role.SIDE)),
    )
    x += 40
    for words, style in marks:
        yield f"<rect x='{x}' y='{y}' width='22' height='{BAR}' {style}/>"
        yield f"<text x='{x + 28}' y='{y + 11}'>{words}</text>"
        x += 60 + round(CHAR * len(words))
    yield f"<rect x='{x}' y='{y + 5}' width='22' height='3' fill='{INK}' opacity='0.35'/>"
    yield f"<text x='{x + 28}' y='{y + 11}'>injected (prompt)</text>"


def _axis(num_tokens: int, scale: float, *, top: int, bottom: int) -> Iterator[str]:
    step = _round_step(num_tokens)
    for depth in range(0, num_tokens + 1, step):
        x = MARGIN + depth * scale
        yield f"<path d='M{x:.1f} {top}V{bottom}' stroke='#e6e6e6'/>"
        yield f"<text x='{x:.1f}' y='{bottom + 14}' text-anchor='middle'>{depth}</text>"
    words = "depth in tokens"
    yield f"<text x='{WIDTH - MARGIN}' y='{bottom + 30}' text-anchor='end'>{words}</text>"


def _round_step(num_tokens: int) -> int:
    """1, 2 or 5 times a power of ten, about ten of them in all."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if num_tokens <= 12 * factor * power:
                return factor * power
        power *= 10
