"""What a simulated run comes to: frozen numbers.

Owns: Result, its buckets and lanes. Must not know: how any of it was measured.
Invariant: the seconds of all buckets sum to devices times wall time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from opengyre.control.facts import Outcome
from opengyre.control.ids import EngineId


class Bucket(StrEnum):
    """Where a device-second goes; each is in exactly one.

    A serving engine's devices are shared out by its slots: used / slots of them generate, the
    rest wait. GENERATING: slots in use. WAITING_FOR_COVERAGE: free slots while the next cell may
    not leave because w is above what would remain. WAITING_FOR_SUPPLY: free slots while it might,
    but too few groups are ready. WAITING_FOR_DATA: a cell in training without work, and free
    slots that no role change could use. TRAINING: members of a step at work. MOVING: role changes
    and weight pulls of joins. PUBLISHING: closed doors, checkpoints, exposed weights.
    IDLE_AT_END: nothing will ever come. LOST: the process is dead.
    """

    GENERATING = "generating"
    TRAINING = "training"
    WAITING_FOR_COVERAGE = "waiting for coverage"
    WAITING_FOR_SUPPLY = "waiting for supply"
    WAITING_FOR_DATA = "waiting for data"
    MOVING = "moving"
    PUBLISHING = "publishing"
    IDLE_AT_END = "idle at the end"
    LOST = "lost"


class Mode(StrEnum):
    """What an engine's devices are for; one lane of them is drawn per engine."""

    ROLLOUT = "rollout"
    PUBLISHING = "publishing"
    MOVING = "moving"
    TRAINING = "training"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """`engine` was in `mode` from `from_s` to `to_s`."""

    engine: EngineId
    mode: Mode
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times are seconds of the simulated clock, from 0.

    step_times: when each step was committed. num_events: facts observed and plans decided.
    slack: idle share of the device-time in role training, until the last commit.
    occupancy: used share of the slots of serving engines. staleness: consumed groups by staleness.
    num_moves: live executions moved off leaving cells; num_replaced: off lost or late engines.
    num_switches: cells that entered training. stalled_s: execution-seconds held, recomputed or
    waiting for KV. aborted_s: execution-seconds of work thrown away by moves, publications and
    deaths. cancelled_s: of work in executions that were cancelled.
    redone_groups: training work of members that left or of abandoned steps, in mean groups.
    num_left_out: stretches beyond the bound of `lanes`.
    """

    name: str
    seed: int
    num_devices: int
    wall_s: float
    step_times: tuple[float, ...]
    num_steps: int
    num_events: int
    device_seconds: Mapping[Bucket, float]
    slack: float
    occupancy: float
    staleness: Mapping[int, int]
    num_dispatched: int
    outcomes: Mapping[Outcome, int]
    num_moves: int
    num_replaced: int
    num_switches: int
    num_publications: int
    stalled_s: float
    recomputed_tokens: float
    kv_moved_tokens: float
    aborted_s: float
    cancelled_s: float
    redone_groups: float
    num_short: int
    num_empty: int
    num_void: int
    num_filtered: int
    num_dropped: int
    failed: bool
    reason: str
    lanes: tuple[Stretch, ...]
    num_left_out: int

    @property
    def moves_per_execution(self) -> float:
        """Moves per closed execution; 0 if none closed."""
        num = sum(self.outcomes.values())
        return self.num_moves / num if num else 0.0

    @property
    def switch_share(self) -> float:
        """Share of the device-seconds spent moving."""
        total_s = self.num_devices * self.wall_s
        return self.device_seconds[Bucket.MOVING] / total_s if total_s else 0.0

    @property
    def steps_per_device_hour(self) -> float:
        """Committed steps that consumed groups, per device-hour."""
        total_s = self.num_devices * self.wall_s
        return (self.num_steps - self.num_empty) * 3600.0 / total_s if total_s else 0.0
