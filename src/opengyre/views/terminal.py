"""The run as it goes on: a live view on a terminal, plain lines elsewhere.

Owns: drawing a ViewState, how often, and the last words. Must not know: schedulers, journals.
Invariants: without a terminal it prints a line for each note and one every `PLAIN_EVERY_S`;
drawing never raises for odd numbers (no capacity, no groups).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from opengyre.store.observations import Role
from opengyre.views.words import final_lines, number, reward, seconds

PLAIN_EVERY_S = 5.0
SAMPLE_EVERY_S = 1.0
LANE_CELLS = 48
BAR_CELLS = 40
NUM_NOTES = 6
ROLE_COLOURS = {
    Role.STARTING: "bright_black",
    Role.ROLLOUT: "dodger_blue2",
    Role.LEAVING: "medium_purple3",
    Role.TRAINING: "dark_orange",
    Role.RETURNING: "medium_purple3",
    Role.LOST: "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLane:
    """One engine now; `cell` None: standalone. `version` is the one it serves."""

    engine: str
    cell: int | None
    role: Role
    num_running: int
    slots: int
    version: int

    @property
    def name(self) -> str:
        if self.cell == 0:
            return f"core {self.engine}"
        return f"{'cell' if self.cell is not None else 'alone'} {self.engine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """What a watcher sees at `wall_s` seconds of the run.

    `step` counts committed steps of `num_steps`. `next_threshold`: the waterlevel at which the
    next cell may leave (C_R - C_e), None if none is left. `num_needed` of `groups_per_step` are
    still to be assigned to the open step. `last_reward` is the mean of the last step's groups,
    `last_step` that step in words, `last_eval` the last evaluation's. `waiting_for` in words, most
    important first.
    """

    wall_s: float
    phase: str
    burst: int
    step: int
    num_steps: int
    policy_version: int
    waterlevel: int
    capacity: int
    next_threshold: int | None
    num_ready: int
    num_needed: int
    groups_per_step: int
    last_reward: float | None
    last_eval: float | None
    tokens_per_s: float
    num_continued: int
    engines: tuple[EngineLane, ...]
    waiting_for: tuple[str, ...]
    last_step: str = ""


class TerminalView:
    """`with TerminalView(console) as view:` then `view.show(state)` about once a second."""

    def __init__(self, console: Console | None = None, *, is_live: bool | None = None) -> None:
        self._console = console if console is not None else Console(stderr=False)
        self._is_live = self._console.is_terminal if is_live is None else is_live
        self._live: Live | None = None
        self._lanes: dict[str, deque[Role]] = {}
        self._notes: deque[str] = deque(maxlen=NUM_NOTES)
        self._next_line_s = 0.0
        self._next_sample_s = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, state: ViewState) -> None:
        """Draw `state`; without a terminal, print a line if the last is old enough."""
        self._sample(state)
        if self._live is not None:
            self._live.update(self.render(state), refresh=True)
        elif state.wall_s >= self._next_line_s:
            self._next_line_s = state.wall_s + PLAIN_EVERY_S
            self._say(plain_line(state))

    def note(self, wall_s: float, words: str) -> None:
        """An event worth a line: kept in the live view, printed at once elsewhere."""
        line = f"{wall_s:7.1f} s  {words}"
        if self._live is None:
            self._say(line)
        else:
            self._notes.append(line)

    def print_final(self, summary: Mapping[str, Any], *, folder: str, report: str) -> None:
        """The end of the run; call after the `with`."""
        for line in final_lines(summary, folder=folder, report=report):
            self._say(line)

    def render(self, state: ViewState) -> Group:
        """The whole live view."""
        full = "#" if self._console.options.ascii_only else "\u2588"
        rows = [
            _headline(state),
            Text(""),
            *(self._lane(one, full) for one in state.engines),
            Text(""),
            _waterlevel(state, full),
            _groups(state, full),
            _rates(state),
            *([Text(f"  last       {state.last_step}")] if state.last_step else []),
            _waiting(state),
        ]
        notes = [Text(line, style="bright_black", overflow="ellipsis") for line in self._notes]
        width = self._console.width
        for row in rows:
            row.truncate(width, overflow="ellipsis")
        return Group(*rows, *([Text("")] if notes else []), *notes)

    def _sample(self, state: ViewState) -> None:
        if state.wall_s < self._next_sample_s:
            return
        self._next_sample_s = state.wall_s + SAMPLE_EVERY_S
        for one in state.engines:
            lane = self._lanes.setdefault(one.engine, deque(maxlen=LANE_CELLS))
            lane.append(one.role)

    def _lane(self, one: EngineLane, full: str) -> Text:
        text = Text(f"  {one.name:<9} ")
        lane = self._lanes.get(one.engine, deque())
        text.append(" " * (LANE_CELLS - len(lane)))
        for role in lane:
            text.append(full, style=ROLE_COLOURS[role])
        text.append(f" {one.role.value:<10}", style=ROLE_COLOURS[one.role])
        text.append(f"{one.num_running:>4}/{one.slots} slots  v{one.version}")
        return text

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_line(state: ViewState) -> str:
    """The state in one line."""
    parts = [
        f"{state.wall_s:7.1f} s  {state.phase}, burst {state.burst}",
        f"step {state.step}/{state.num_steps}",
        f"w {state.waterlevel} of C_R {state.capacity}{_threshold_words(state)}",
        f"cells {' '.join(f'{one.engine}:{one.role.value}' for one in state.engines)}",
        f"ready {state.num_ready} of {state.num_needed} needed",
        f"reward {reward(state.last_reward)}",
        f"{state.tokens_per_s:.0f} tokens/s",
    ]
    if state.waiting_for:
        parts.append(f"waiting: {state.waiting_for[0]}")
    return ", ".join(parts)


def _threshold_words(state: ViewState) -> str:
    if state.next_threshold is None:
        return ""
    return f" (next cell leaves at {state.next_threshold})"


def _headline(state: ViewState) -> Text:
    text = Text("  ")
    text.append(f"step {state.step}/{state.num_steps}", style="bold")
    text.append(f"  burst {state.burst}  version {state.policy_version}  {state.phase}")
    text.append(f"  {seconds(state.wall_s)}", style="bright_black")
    return text


def _waterlevel(state: ViewState, full: str) -> Text:
    """w as a bar; `|` where the next cell may leave, the bar's end is C_R or w."""
    top = max(state.waterlevel, state.capacity, 1)
    text = Text("  waterlevel ")
    filled = round(BAR_CELLS * state.waterlevel / top)
    threshold = state.next_threshold
    mark = None if threshold is None else min(BAR_CELLS - 1, round(BAR_CELLS * threshold / top))
    for place in range(BAR_CELLS):
        if place == mark:
            text.append("|", style="bold red")
        elif place < filled:
            text.append(full, style="dodger_blue2")
        else:
            text.append(full, style="grey19")
    text.append(f" {state.waterlevel} of {state.capacity} slots{_threshold_words(state)}")
    return text


def _groups(state: ViewState, full: str) -> Text:
    top = max(state.num_ready, state.num_needed, state.groups_per_step, 1)
    text = Text("  groups     ")
    ready = round(BAR_CELLS * state.num_ready / top)
    text.append(full * ready, style="green3")
    text.append(full * (BAR_CELLS - ready), style="grey19")
    text.append(f" {state.num_ready} ready, {state.num_needed} needed")
    return text


def _rates(state: ViewState) -> Text:
    words = f"  reward     {reward(state.last_reward)}   eval {reward(state.last_eval)}"
    continued = number(state.num_continued, "request")
    return Text(f"{words}   {state.tokens_per_s:.0f} tokens/s   {continued} continued")


def _waiting(state: ViewState) -> Text:
    words = "; ".join(state.waiting_for) or "nothing"
    return Text(f"  waiting    {words}", style="bright_black")
