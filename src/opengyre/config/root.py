"""RunConfig: everything a run is told, and the rules that span several keys.

Owns: the whole of the config and its cross-field rules. Must not know: TOML, files, wording of
type errors (see load.py). Invariant: what `find_problems` returns is empty for every config that
`load_config` gave out.
"""

from pydantic import Field

from opengyre.config.base import Section
from opengyre.config.grading import GradingConfig, grading_problems
from opengyre.config.reward import RewardConfig, reward_problems
from opengyre.config.schedule import (
    ScheduleConfig,
    TopologyConfig,
    group_problems,
    num_groups_ahead,
)
from opengyre.config.sections import (
    EngineConfig,
    EvalConfig,
    GatewayConfig,
    HarnessConfig,
    ModelConfig,
    RunSection,
    SamplingConfig,
    StoreConfig,
    TaskSourceConfig,
)
from opengyre.config.training import (
    TrainingConfig,
    excess_problems,
    objective_problems,
    objective_warnings,
    role_problems,
)

MAX_PORT = 65_535


class RunConfig(Section):
    """A whole run. Tables without required keys may be left out of the TOML."""

    run: RunSection
    model: ModelConfig
    tasks: tuple[TaskSourceConfig, ...] = Field(min_length=1, description="sources of tasks")
    eval: EvalConfig | None = Field(
        default=None, description="held-out tasks; left out: no evaluation"
    )
    topology: TopologyConfig = TopologyConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    reward: RewardConfig = RewardConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()


def find_problems(config: RunConfig) -> list[str]:
    """Rules that span several keys; each answer is one line: key = value: expected ..."""
    return [
        *_schedule_problems(config.schedule),
        *_policy_problems(config),
        *_token_problems(config),
        *_embedded_problems(config),
        *_handoff_problems(config.engine),
        *_task_problems(config),
        *_program_problems(config),
        *_gateway_problems(config.gateway),
        *grading_problems(config.grading),
        *excess_problems(config.training),
        *role_problems(config.training),
        *objective_problems(config.training),
        *reward_problems(config.reward),
    ]


def config_warnings(config: RunConfig) -> list[str]:
    """What works, but not as a reader of the config would expect; one line each."""
    return [
        *_ahead_warnings(config),
        *_sampling_warnings(config),
        *objective_warnings(config.training),
    ]


def _ahead_warnings(config: RunConfig) -> list[str]:
    schedule, topology = config.schedule, config.topology
    ahead = num_groups_ahead(schedule) * schedule.group_size
    what = "phi*B*N" if schedule.oversample == 1 else "phi*B*N, oversampled"
    free = topology.num_slots - topology.slots_per_cell
    if ahead <= free or schedule.policy != "elastic":
        return []
    return [
        f"schedule.run_ahead keeps {ahead} executions ({what}) ahead, but only {free} slots "
        f"remain without the core: it can leave rollout only after {ahead - free} of them closed"
    ]


def _sampling_warnings(config: RunConfig) -> list[str]:
    own, chosen = SamplingConfig(), config.sampling
    cut = [key for key in ("top_p", "top_k", "min_p") if getattr(chosen, key) != getattr(own, key)]
    if not cut or config.topology.engine != "embedded":
        return []
    told = " and ".join(f"sampling.{key} = {getattr(chosen, key):g}" for key in cut)
    return [
        f"{told}: log probabilities are recorded of the tokens that this keeps, the trainer's are "
        "of all tokens, so ratios are off from the start; leave it out"
    ]


def _schedule_problems(schedule: ScheduleConfig) -> list[str]:
    problems = group_problems(schedule)
    if schedule.hold_max_s < schedule.publish_timeout_s:
        problems.append(
            f"schedule.hold_max_s = {schedule.hold_max_s:g}: expected at least "
            f"schedule.publish_timeout_s = {schedule.publish_timeout_s:g}; requests are held "
            "while an engine loads"
        )
    return problems


def _policy_problems(config: RunConfig) -> list[str]:
    schedule, topology = config.schedule, config.topology
    num, given = schedule.num_training_cells, "schedule.num_training_cells = "
    if schedule.policy != "async":
        where = 'only schedule.policy = "async" has a fixed split'
        return [f"{given}{num}: expected 0; {where}"] if num else []
    most = topology.num_cells if topology.num_standalone else topology.num_cells - 1
    if 1 <= num <= most:
        return []
    return [
        f"{given}{num}: expected 1 to {most} with async; the other engines of "
        f"{topology.num_cells} cells and {topology.num_standalone} standalone ones roll out"
    ]


def _token_problems(config: RunConfig) -> list[str]:
    context = config.sampling.context_tokens
    problems = []
    if config.sampling.max_new_tokens >= context:
        problems.append(
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens}: expected less than "
            f"sampling.context_tokens = {context}"
        )
    if (num := config.training.micro_step_tokens) < context:
        problems.append(
            f"training.micro_step_tokens = {num}: expected at least sampling.context_tokens = "
            f"{context}; one path must fit"
        )
    most, room = config.engine.max_batch * context, config.engine.kv_tokens
    if room is not None and room < most and config.topology.engine == "embedded":
        problems.append(
            f"engine.kv_tokens = {room}: expected at least {most}, which is engine.max_batch = "
            f"{config.engine.max_batch} times sampling.context_tokens = {context}; lower one of "
            "them, or leave kv_tokens out"
        )
    return problems


def _embedded_problems(config: RunConfig) -> list[str]:
    if config.topology.engine != "embedded":
        return []
    problems = []
    if config.model.dtype == "bfloat16":
        problems.append(
            'model.dtype = "bfloat16": expected "float32" or "float64" with topology.engine = '
            '"embedded", because cells sum gradients and update weights in this type; leave it '
            "out for float32"
        )
    if config.sampling.temperature == 0:
        problems.append(
            "sampling.temperature = 0: expected more than 0 with topology.engine = "
            '"embedded", because what greedy sampling chose has no probability to train on'
        )
    return problems


def _handoff_problems(engine: EngineConfig) -> list[str]:
    if not engine.kv_handoff_idle or engine.kv_handoff != "off":
        return []
    return [
        'engine.kv_handoff_idle = true: expected engine.kv_handoff = "on" or "auto" beside it; it '
        'is "off"'
    ]


def _task_problems(config: RunConfig) -> list[str]:
    paths = [source.path for source in config.tasks]
    problems = [
        f"tasks[{number}].path = {path}: expected a source that is not listed before it"
        for number, path in enumerate(paths)
        if path in paths[:number]
    ]
    held_out = config.eval
    if held_out is None:
        return problems
    if held_out.path in paths:
        problems.append(
            f"eval.path = {held_out.path}: expected held-out tasks, not a folder of [[tasks]]"
        )
    if not (held_out.at_start or held_out.at_end or held_out.every_bursts):
        problems.append(
            "eval.every_bursts = 0: expected at least 1 beside at_start = false and "
            "at_end = false; or leave [eval] out"
        )
    return problems


def _gateway_problems(gateway: GatewayConfig) -> list[str]:
    last = gateway.port + gateway.num_processes - 1
    if gateway.port == 0 or last <= MAX_PORT:
        return []
    return [
        f"gateway.port = {gateway.port}: expected at most {MAX_PORT - gateway.num_processes + 1}; "
        f"the {gateway.num_processes} processes listen at this port and the next ones"
    ]


def _program_problems(config: RunConfig) -> list[str]:
    topology, harness = config.topology, config.harness
    problems = []
    if topology.engine == "scripted" and config.engine.scripted.policy is None:
        problems.append(
            "engine.scripted.policy is missing: expected file.py:function, "
            'because topology.engine = "scripted"'
        )
    if topology.cell == "embedded" and topology.engine == "scripted":
        problems.append(
            'topology.cell = "embedded": expected topology.cell = "emulated" beside a scripted '
            "engine, which has no model for cells to train"
        )
    if topology.cell == "emulated" and topology.engine == "embedded":
        problems.append(
            'topology.cell = "emulated": expected topology.engine = "scripted" beside it; '
            "emulated cells have no weights for an embedded engine to load"
        )
    if topology.cell == "emulated" and topology.stages_per_cell > 1:
        problems.append(
            f"topology.stages_per_cell = {topology.stages_per_cell}: expected 1 with "
            'topology.cell = "emulated", which has no layers to cut'
        )
    if harness.overall_timeout_verdict == "graded" and harness.overall_timeout_s is None:
        problems.append(
            'harness.overall_timeout_verdict = "graded": expected harness.overall_timeout_s '
            "beside it"
        )
    if (harness.profile == "command") != bool(harness.command):
        problems.append(
            f"harness.command = {list(harness.command)}: expected a program and its arguments "
            'if and only if harness.profile = "command"'
        )
    return problems
