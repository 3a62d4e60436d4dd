"""A scenario file of `gyre simulate`: what is simulated, every number with its meaning.

Owns: keys, defaults, bounds and cross-field rules of a scenario. Must not know: TOML, files, how
the simulator uses a value. Invariant: what `simulation_problems` returns is empty for every
config that `load_simulation` gave out. One device is one unit of the budget: a GPU or a node.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from opengyre.config.base import ConfigPath, Section
from opengyre.config.schedule import default_staleness, group_problems
from opengyre.config.simulation_costs import (
    CheckpointCostsConfig,
    EngineCostsConfig,
    GraderCostsConfig,
    PublicationCostsConfig,
    Seconds,
    Share,
    SwitchCostsConfig,
    ToolCostsConfig,
    TrainingCostsConfig,
)
from opengyre.control.quota import most_outstanding

PolicyName = Literal["elastic", "colocate", "async"]
PositiveSeconds = Annotated[float, Field(ge=1e-6, le=1e9)]
MAX_AT_ONCE = 2_000_000
MAX_NAME_CHARS = 64


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("expected letters, digits and signs on one line")
    return name


class ScenarioSection(Section):
    """Which run is simulated, and how often."""

    name: Annotated[str, AfterValidator(_printable)] = Field(
        min_length=1, max_length=MAX_NAME_CHARS, description="how tables call this scenario"
    )
    num_steps: int = Field(ge=1, le=100_000, description="updates to run")
    stop_after_step: int | None = Field(
        default=None,
        ge=1,
        description="stop the clock at this update, dispatching as if the run went on",
    )
    num_seeds: int = Field(
        default=4, ge=1, le=10_000, description="seeds 1..n a table is the mean of"
    )
    published_time: float | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="published time of this row, relative to the reference row",
    )


class SimulatedTopology(Section):
    """Devices and the slots they give."""

    num_cells: int = Field(ge=1, le=20_000, description="cells; cell 0 is the core")
    devices_per_cell: int = Field(ge=1, le=100_000, description="devices of one cell")
    num_standalone: int = Field(
        default=0, ge=0, le=20_000, description="rollout engines that never train"
    )
    devices_per_standalone: int = Field(
        default=1, ge=1, le=100_000, description="devices of one standalone engine"
    )
    slots_per_device: float = Field(
        gt=0,
        le=1e6,
        description="executions a device serves at a time, on the mean of its engine, "
        "which has at least one slot",
    )

    @property
    def num_devices(self) -> int:
        cells = self.num_cells * self.devices_per_cell
        return cells + self.num_standalone * self.devices_per_standalone


class SimulatedSchedule(Section):
    """Letters of the paper: N group_size, B groups_per_step, mu steps_per_burst, phi run_ahead."""

    policy: PolicyName = Field(default="elastic", description="how cells change roles")
    streaming: bool = Field(
        default=True, description="train ready groups at once, or only whole batches"
    )
    num_training_cells: int = Field(
        default=0, ge=0, description="async only: cells 0..n-1 always train, the others never"
    )
    group_size: int = Field(
        default=8, ge=1, le=1024, description="N, executions of one task in a group"
    )
    groups_per_step: int = Field(default=16, ge=1, le=65_536, description="B, groups of an update")
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
        default=False, description="do not train groups whose valid members' verdicts are all equal"
    )
    max_staleness: int = Field(
        default_factory=default_staleness,
        ge=0,
        description="updates between a group's dispatch and its training "
        "(default phi + mu, times oversample)",
    )
    overdue: Literal["wait", "drop"] = Field(
        default="wait", description="when an old group is not ready: wait for it, or drop it"
    )
    supply_fraction: float = Field(
        default=0.125, gt=0, le=0.5, description="share of B that must be ready"
    )
    supply_hold_s: Seconds = Field(
        default=1.0, description="how long the supply must hold without a break"
    )
    min_valid_members: int = Field(
        default=2, ge=1, le=1024, description="verdicts a group needs; with fewer it is void"
    )
    recall_after_s: float = Field(
        default=60.0, gt=0, le=1e9, description="lack of slots after which a cell is called back"
    )
    join_deadline_s: float = Field(
        default=600.0, gt=0, le=1e9, description="how long a step waits for an admitted cell"
    )
    publish_timeout_s: float = Field(
        default=600.0, gt=0, le=1e9, description="when an engine that is not verified is given up"
    )


class SimulatedCosts(Section):
    """What things cost; every number here is an assumption or a measurement of yours."""

    training: TrainingCostsConfig
    engine: EngineCostsConfig = EngineCostsConfig()
    switch: SwitchCostsConfig = SwitchCostsConfig()
    publication: PublicationCostsConfig = PublicationCostsConfig()
    checkpoint: CheckpointCostsConfig = CheckpointCostsConfig()
    grader: GraderCostsConfig = GraderCostsConfig()
    tools: ToolCostsConfig = ToolCostsConfig()


class SimulatedWorkload(Section):
    """How long executions last on a full engine. Either lognormal (mean_s) or a CSV file."""

    mean_s: PositiveSeconds | None = Field(
        default=None, description="lognormal: mean duration before any cap"
    )
    sigma_between: float = Field(
        default=0.0, ge=0, le=5, description="lognormal: sigma of ln(duration) between groups"
    )
    sigma_within: float = Field(
        default=0.0, ge=0, le=5, description="lognormal: sigma of ln(duration) inside a group"
    )
    csv: ConfigPath | None = Field(
        default=None,
        description="recorded durations: columns group, duration_s[, has_verdict]; of a group "
        "the first group_size members, of a smaller one some again",
    )
    harness_cap_s: PositiveSeconds | None = Field(
        default=None, description="the harness's own time-out; what is there is graded"
    )
    overall_cap_s: PositiveSeconds | None = Field(
        default=None, description="time-out around everything; see is_overall_graded"
    )
    is_overall_graded: bool = Field(
        default=False, description="an execution that the overall cap ended keeps its verdict"
    )
    no_verdict_rate: Share = Field(default=0.0, description="share of executions with no verdict")
    void_rate: float = Field(
        default=0.0, ge=0, lt=1, description="share of groups none of whose members has a verdict"
    )
    zero_variance_share: Share = Field(
        default=0.0, description="share of groups all of whose verdicts are equal"
    )


class FailureConfig(Section):
    """One planned death."""

    at_s: Seconds = Field(description="when the process dies, in seconds of the run")
    engine: str = Field(description="which engine: c0, c1, ... of the cells, s0, s1, ... alone")
    restart_after_s: PositiveSeconds | None = Field(
        default=None, description="when it is up again; left out: never"
    )


class SimulationConfig(Section):
    """A whole scenario. Tables without required keys may be left out of the TOML."""

    scenario: ScenarioSection
    topology: SimulatedTopology
    schedule: SimulatedSchedule = SimulatedSchedule()
    costs: SimulatedCosts
    workload: SimulatedWorkload
    failures: tuple[FailureConfig, ...] = Field(default=(), description="planned deaths")


def simulation_problems(config: SimulationConfig) -> list[str]:
    """Rules that span several keys; each answer is one line: key = value: expected ..."""
    return [
        *_stop_problems(config.scenario),
        *group_problems(config.schedule),
        *_size_problems(config),
        *_split_problems(config),
        *_workload_problems(config.workload),
        *_failure_problems(config),
    ]


def _stop_problems(section: ScenarioSection) -> list[str]:
    if section.stop_after_step is None or section.stop_after_step <= section.num_steps:
        return []
    return [
        f"scenario.stop_after_step = {section.stop_after_step}: expected at most "
        f"scenario.num_steps = {section.num_steps}"
    ]


def _size_problems(config: SimulationConfig) -> list[str]:
    """Each execution that is dispatched and not closed yet takes memory."""
    schedule = config.schedule
    steps = min(config.scenario.num_steps, schedule.steps_per_burst + schedule.run_ahead)
    num_groups = most_outstanding(
        num_steps=steps,
        groups_per_step=schedule.groups_per_step,
        oversample=schedule.oversample,
    )
    num = num_groups * schedule.group_size
    if num <= MAX_AT_ONCE:
        return []
    return [
        f"schedule.groups_per_step = {schedule.groups_per_step}: expected at most {MAX_AT_ONCE:_} "
        f"executions at a time, not {num:_} (steps_per_burst + run_ahead steps x groups_per_step "
        "x oversample x group_size)"
    ]


def _split_problems(config: SimulationConfig) -> list[str]:
    """An async split needs both sides; the other policies have none."""
    num, topology = config.schedule.num_training_cells, config.topology
    most = topology.num_cells - (0 if topology.num_standalone else 1)
    if config.schedule.policy == "async":
        if most < 1:
            return [
                f"topology.num_cells = {topology.num_cells}: expected at least 2, or standalone "
                'engines, because schedule.policy = "async" splits the cells'
            ]
        if not 1 <= num <= most:
            return [
                f"schedule.num_training_cells = {num}: expected 1 to {most}, because "
                'schedule.policy = "async" needs cells that train and engines that roll out'
            ]
    elif num:
        return [
            f"schedule.num_training_cells = {num}: expected 0, because "
            f'schedule.policy = "{config.schedule.policy}" has no fixed split'
        ]
    return []


def _workload_problems(workload: SimulatedWorkload) -> list[str]:
    if (workload.mean_s is None) == (workload.csv is None):
        return ["workload.mean_s: expected either mean_s (lognormal) or csv (recorded durations)"]
    if workload.csv is not None and (workload.sigma_between or workload.sigma_within):
        return ["workload.csv: expected no sigma_between or sigma_within beside it"]
    return []


def _failure_problems(config: SimulationConfig) -> list[str]:
    topology = config.topology
    names = {f"c{number}" for number in range(topology.num_cells)}
    names |= {f"s{number}" for number in range(topology.num_standalone)}
    return [
        f"failures[{number}].engine = {one.engine}: expected c0 to c{topology.num_cells - 1}"
        + (f" or s0 to s{topology.num_standalone - 1}" if topology.num_standalone else "")
        for number, one in enumerate(config.failures)
        if one.engine not in names
    ]
