"""Everything that can be wrong with a run's input, checked before anything is written.

Owns: from RunConfig to tasks, limits and the scheduler's numbers. Raises ConfigError only.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from opengyre.config.harness_profile import HarnessProfile, load_profile
from opengyre.config.root import RunConfig, config_warnings
from opengyre.control.config import EngineSpec, Overdue, PolicyName, SchedulerConfig
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.harness.profiles import Staged, check_launch, open_harness
from opengyre.harness.programs import Program, find_program
from opengyre.runtime.grading import grader_files
from opengyre.runtime.memory_words import machine_bytes, memory_lines, memory_warnings
from opengyre.runtime.objective_trial import try_own_objective
from opengyre.runtime.rewards import load_transforms
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Harness, Limits
from opengyre.seams.tasks import GraderKind
from opengyre.tasks.source import SampledTasks, open_source, refuse_overlap
from opengyre.trainer.layers import refuse_uncuttable
from opengyre.trajectory.shaping import NamedTransform

MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")
INDEX = "model.safetensors.index.json"
"""In the place of model.safetensors where weights lie in several files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run starts from; `warnings` are lines for the user, and so is `memory`: what the core
    will hold. The config's model path is a folder on this machine; `transforms` were tried."""

    config: RunConfig
    train: SampledTasks
    evaluation: SampledTasks | None
    scheduler: SchedulerConfig
    profile: HarnessProfile
    program: Program | None
    warnings: tuple[str, ...]
    memory: tuple[str, ...] = ()
    transforms: tuple[NamedTransform, ...] = ()
    grader_files: tuple[Path, ...] = ()


def prepare(config: RunConfig) -> Prepared:
    """Read and check the input. Raises ConfigError."""
    profile = load_profile(config.harness.profile)
    check_launch(profile, config.harness.command)
    program = find_program(profile, config.harness.program)
    folder = model_folder(config.model.path)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(folder)})}
    )
    train = open_source(
        [(one.path, one.weight, one.seed) for one in config.tasks],
        seed=config.run.seed,
        kind=GraderKind(config.grading.kind),
    )
    evaluation = None
    if config.eval is not None:
        evaluation = open_source(
            [(config.eval.path, 1.0, 0)], seed=0, kind=GraderKind(config.grading.kind)
        )
        refuse_overlap(train.tasks, evaluation.tasks)
    _refuse_stages(config)
    try_own_objective(config)
    return Prepared(
        config=config,
        train=train,
        evaluation=evaluation,
        scheduler=scheduler_config(config, 0 if evaluation is None else evaluation.num_tasks),
        profile=profile,
        program=program,
        warnings=(
            *config_warnings(config),
            *memory_warnings(config, has_bytes=machine_bytes()),
        ),
        memory=tuple(memory_lines(config)),
        transforms=load_transforms(config.reward),
        grader_files=grader_files(config.grading),
    )


def model_folder(name: str) -> Path:
    """The folder of `name`, a path or a hub id that is fetched first. Raises ConfigError."""
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.count("/") != 1:
            what = "expected a folder with " + ", ".join(MODEL_FILES)
            raise ConfigError(f"model.path = {name}: no such folder; {what}")
        folder = _fetched(name)
    missing = [one for one in MODEL_FILES if not (folder / one).is_file()]
    if (folder / INDEX).is_file():
        missing = [one for one in missing if one != MODEL_FILES[-1]]
    if missing:
        raise ConfigError(f"model.path = {folder}: it lacks {', '.join(missing)}; add them")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: expected JSON: {error}") from error
    return folder


def _refuse_stages(config: RunConfig) -> None:
    """Raises ConfigError for a model that cannot be cut as the config says."""
    num_stages = config.topology.stages_per_cell
    if num_stages > 1:
        from transformers import AutoConfig

        try:
            model = AutoConfig.from_pretrained(config.model.path)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"model.path = {config.model.path}: {first}") from error
        refuse_uncuttable(model, num_stages)


def _fetched(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError, HfHubHTTPError, HTTPError) as error:
        first = str(error).splitlines()[0]
        what = f"model.path = {hub_id}: no such folder, and the hub did not give it ({first})"
        raise ConfigError(f"{what}; name a model folder") from error


def scheduler_config(config: RunConfig, num_eval: int) -> SchedulerConfig:
    """The scheduler's numbers; `num_eval` held-out tasks, one execution each."""
    schedule, topology = config.schedule, config.topology
    cells = tuple(
        EngineSpec(engine=cell_engine_id(k), slots=topology.slots_per_cell, cell=k)
        for k in range(topology.num_cells)
    )
    standalone = tuple(
        EngineSpec(engine=standalone_engine_id(k), slots=topology.slots_per_standalone, cell=None)
        for k in range(topology.num_standalone)
    )
    evaluation = config.eval
    return SchedulerConfig(
        num_cells=topology.num_cells,
        engines=cells + standalone,
        num_steps=config.run.num_steps,
        policy=PolicyName(schedule.policy),
        is_streaming=schedule.streaming,
        num_training_cells=schedule.num_training_cells,
        group_size=schedule.group_size,
        groups_per_step=schedule.groups_per_step,
        steps_per_burst=schedule.steps_per_burst,
        run_ahead=schedule.run_ahead,
        oversample=schedule.oversample,
        filter_zero_variance=schedule.filter_zero_variance,
        supply_fraction=schedule.supply_fraction,
        supply_hold_s=schedule.supply_hold_s,
        min_valid_members=schedule.min_valid_members,
        max_void_in_a_row=schedule.max_void_in_a_row,
        max_staleness=schedule.max_staleness,
        overdue=Overdue(schedule.overdue),
        recall_after_s=schedule.recall_after_s,
        join_deadline_s=schedule.join_deadline_s,
        publish_timeout_s=schedule.publish_timeout_s,
        eval_every_bursts=0 if evaluation is None else evaluation.every_bursts,
        num_eval_executions=num_eval,
        eval_at_start=evaluation is not None and evaluation.at_start,
        eval_at_end=evaluation is not None and evaluation.at_end,
        eval_deadline_s=600.0 if evaluation is None else evaluation.deadline_s,
    )


def harness_of(prepared: Prepared, staged: Staged) -> Harness:
    """The agent program of the config, as this machine starts it."""
    config = prepared.config
    settings = {
        "max_turns": config.harness.max_turns,
        "max_new_tokens": config.sampling.max_new_tokens,
        "context_tokens": config.sampling.context_tokens,
    }
    return open_harness(
        prepared.profile,
        prepared.program,
        staged=staged,
        settings={name: str(value) for name, value in settings.items()},
        command=config.harness.command,
    )


def limits_of(config: RunConfig) -> Limits:
    bounds = config.harness.limits
    return Limits(
        wall_s=config.harness.timeout_s,
        memory_bytes=bounds.memory_bytes,
        output_bytes=bounds.output_bytes,
        num_processes=bounds.num_processes,
        num_open_files=bounds.num_open_files,
        file_size_bytes=bounds.file_size_bytes,
    )
