"""The run's phases and the burst's place in it.

Owns: Phase and its transition table, Burst. Must not know: groups, engines, commands.
Invariant: phases follow the table; a burst's steps never exceed its number.
"""

from dataclasses import dataclass
from enum import Enum

from opengyre.control.errors import InvariantError


class Phase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    EXPOSING = "exposing"
    FINAL_EVAL = "final evaluation"
    ENDING = "ending"
    ENDED = "ended"


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.EXPOSING, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.CHECKPOINTING, Phase.EXPOSING, Phase.ENDING}),
    Phase.CHECKPOINTING: frozenset({Phase.EXPOSING, Phase.RUNNING, Phase.ENDING}),
    Phase.EXPOSING: frozenset({Phase.RUNNING, Phase.FINAL_EVAL, Phase.ENDING}),
    Phase.FINAL_EVAL: frozenset({Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(slots=True, kw_only=True)
class Burst:
    """`number` counts from 1 once the first boundary was passed; `num_done` of `num_steps`
    steps are committed, or skipped because no group was left (`num_skipped` of them)."""

    phase: Phase = Phase.STARTING
    number: int = 0
    num_steps: int = 0
    num_done: int = 0
    num_skipped: int = 0

    def move(self, phase: Phase) -> None:
        if phase not in PHASE_TRANSITIONS[self.phase]:
            raise InvariantError(f"run: {self.phase.value} -> {phase.value}")
        self.phase = phase

    @property
    def num_left(self) -> int:
        return self.num_steps - self.num_done
