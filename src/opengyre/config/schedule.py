"""Settings of the scheduler and of the cells it moves: `[topology]` and `[schedule]`.

Owns: their keys, defaults and bounds. Must not know: how the scheduler decides; the control plane
takes frozen dataclasses made from these models by the runtime.
"""

from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from opengyre.config.base import Section
from opengyre.control.quota import least_staleness, most_outstanding
from opengyre.seams.weights import PlaneKind

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def default_staleness(data: dict[str, Any]) -> int:
    """One more than the least; `data` holds the keys before it."""
    least = least_staleness(
        num_steps=data["run_ahead"] + data["steps_per_burst"],
        groups_per_step=data["groups_per_step"],
        oversample=data["oversample"],
    )
    return least + 1


class TopologyConfig(Section):
    """Which processes hold the work, and how many executions each may serve."""

    num_cells: int = Field(default=3, ge=1, le=64, description="cells; cell 0 is the core")
    num_standalone: int = Field(
        default=1, ge=0, le=256, description="rollout engines that never train"
    )
    slots_per_cell: int = Field(
        default=8, ge=1, le=4096, description="executions a cell's engine serves"
    )
    slots_per_standalone: int = Field(
        default=8, ge=1, le=4096, description="executions a standalone engine serves"
    )
    engine: Literal["embedded", "scripted"] = Field(
        default="embedded", description="rollout engine of cells and standalone engines"
    )
    cell: Literal["embedded", "emulated"] = Field(
        default="embedded",
        description="training side of a cell; emulated takes time and counts only",
    )

    weight_plane: PlaneKind = Field(
        default="shm",
        description="how weights, gradients and prefixes travel between processes: shared "
        "memory or TCP",
    )
    stages_per_cell: int = Field(
        default=1,
        ge=1,
        le=64,
        description="pipeline stages of a cell's training, each a process with its layers of the "
        "model",
    )

    @property
    def num_slots(self) -> int:
        return (
            self.num_cells * self.slots_per_cell + self.num_standalone * self.slots_per_standalone
        )


class ScheduleConfig(Section):
    """Letters of the paper: N group_size, B groups_per_step, mu steps_per_burst, phi run_ahead."""

    policy: Literal["elastic", "colocate", "async"] = Field(
        default="elastic",
        description="how cells change roles: one by one, all together, or never",
    )
    streaming: bool = Field(
        default=True, description="train groups as they get ready; false: a step starts whole"
    )
    num_training_cells: int = Field(
        default=0, ge=0, le=64, description="async only: cells 0..n-1 always train, others never"
    )
    group_size: int = Field(
        default=8, ge=2, le=1024, description="N, executions of one task in a group"
    )
    groups_per_step: int = Field(default=16, ge=1, le=4096, description="B, groups of one update")
    steps_per_burst: int = Field(
        default=2, ge=1, le=1024, description="mu, updates before a publication"
    )
    run_ahead: int = Field(
        default=1, ge=0, le=64, description="phi, steps of groups that rollout runs ahead"
    )
    oversample: float = Field(
        default=1.0,
        ge=1,
        le=16,
        description="groups dispatched per group that steps take, in the hope that filtered ones "
        "leave no step short",
    )
    filter_zero_variance: bool = Field(
        default=False, description="do not train groups whose valid members' rewards are all equal"
    )
    supply_fraction: float = Field(
        default=0.125,
        gt=0,
        le=0.5,
        description="share of B that must be ready before a cell leaves",
    )
    supply_hold_s: float = Field(
        default=1.0, ge=0, le=3600, description="how long the supply must hold without a break"
    )
    min_valid_members: int = Field(
        default=2, ge=1, le=1024, description="verdicts a group needs; with fewer it is void"
    )
    max_void_in_a_row: int = Field(
        default_factory=lambda data: 3 * data["groups_per_step"],
        ge=1,
        description="void groups in a row that stop the run (default 3 B)",
    )
    max_staleness: int = Field(
        default_factory=default_staleness,
        ge=0,
        description="updates between a group's dispatch and its training "
        "(default phi + mu, times oversample)",
    )
    overdue: Literal["wait", "drop"] = Field(
        default="wait",
        description="when an old group is not ready: wait for it, or drop it and say so",
    )
    recall_after_s: Seconds = Field(
        default=60.0, description="lasting lack of slots after which a training cell is called back"
    )
    join_deadline_s: Seconds = Field(
        default=30.0, description="how long a step waits for a cell that was admitted to it"
    )
    publish_timeout_s: Seconds = Field(
        default=120.0,
        description="an engine that has not verified a version by then is quarantined",
    )
    hold_max_s: Seconds = Field(default=240.0, description="longest time a request is held open")
    max_launches: int = Field(
        default=2, ge=1, le=16, description="launches of one execution when ours was the fault"
    )


def num_groups_ahead(schedule: ScheduleConfig) -> int:
    """Groups that outlive their burst if none is filtered: phi B without oversampling."""
    steps, groups_per_step = schedule.steps_per_burst, schedule.groups_per_step
    num_most = most_outstanding(
        num_steps=steps + schedule.run_ahead,
        groups_per_step=groups_per_step,
        oversample=schedule.oversample,
    )
    return num_most - steps * groups_per_step


class GroupNumbers(Protocol):
    """What a live run's schedule and a simulated one have in common."""

    group_size: int
    groups_per_step: int
    min_valid_members: int
    steps_per_burst: int
    run_ahead: int
    oversample: float
    max_staleness: int


def group_problems(schedule: GroupNumbers) -> list[str]:
    """What these keys say about each other; one line each."""
    problems = []
    least = least_staleness(
        num_steps=schedule.run_ahead + schedule.steps_per_burst,
        groups_per_step=schedule.groups_per_step,
        oversample=schedule.oversample,
    )
    if schedule.max_staleness < least:
        times = "" if schedule.oversample == 1 else ", oversampled"
        problems.append(
            f"schedule.max_staleness = {schedule.max_staleness}: expected at least {least} "
            f"(run_ahead + steps_per_burst - 1{times}); no order of groups can keep less"
        )
    if schedule.min_valid_members > schedule.group_size:
        problems.append(
            f"schedule.min_valid_members = {schedule.min_valid_members}: expected at most "
            f"schedule.group_size = {schedule.group_size}"
        )
    return problems
