"""`gyre harness try`: from what a person asked to the report of one execution.

Owns: the choice of task and engine. Must not know: how it is printed. Invariant: everything that
can be wrong with the input is a ConfigError before a program is started.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from opengyre.config.harness_profile import load_profile
from opengyre.harness.profiles import check_launch
from opengyre.harness.programs import find_program
from opengyre.runtime.trying.engine import (
    TryEngine,
    embedded_try_engine,
    scripted_try_engine,
    served_try_engine,
)
from opengyre.runtime.trying.example_task import SOLUTION_SCRIPT, solution_of, write_example_task
from opengyre.runtime.trying.execution import Played, Stage, StageSettings, open_stage, play
from opengyre.runtime.trying.report import TryReport, report_of
from opengyre.runtime.trying.solver import ScriptedSolver
from opengyre.seams.errors import BoundaryError, ConfigError, words_of
from opengyre.seams.harness import Limits
from opengyre.seams.tasks import Task
from opengyre.store.run_folder import write_json
from opengyre.tasks.harbor import load_task

LOOK_AROUND = "ls -l"


@dataclass(frozen=True, slots=True, kw_only=True)
class TryAsked:
    """`harness` is a profile's name or path; `task` None is the example, `model` None a script.
    `engine` is the address of a server of `model`; None: the model runs in this process."""

    harness: str
    command: tuple[str, ...] = ()
    program: Path | None = None
    task: Path | None = None
    model: str | None = None
    engine: str | None = None
    keep: Path | None = None
    timeout_s: float = 300.0
    is_unsafe_allowed: bool = False


async def try_harness(asked: TryAsked) -> TryReport:
    """One execution. Raises ConfigError for the user's input, BoundaryError for the sandbox."""
    try:
        return await _try(asked)
    except* ConfigError as group:
        raise ConfigError(words_of(group)) from None
    except* BoundaryError as group:
        raise BoundaryError("trying a harness", words_of(group), retryable=False) from None


async def _try(asked: TryAsked) -> TryReport:
    profile = load_profile(asked.harness)
    check_launch(profile, asked.command)
    if asked.engine is not None and asked.model is None:
        raise ConfigError("--engine needs --model FOLDER beside it: the model's tokenizer")
    if asked.keep is not None and asked.keep.exists():
        raise ConfigError(f"--keep {asked.keep}: is there already; name a new folder")
    program = find_program(profile, asked.program)
    with tempfile.TemporaryDirectory(prefix="gyre-try-") as scratch:
        task = load_task(asked.task or write_example_task(Path(scratch, "example")))
        async with _open_engine(asked, task, Path(scratch)) as chosen:
            settings = StageSettings(
                profile=profile,
                program=program,
                model=chosen.model,
                context_tokens=chosen.context_tokens,
                command=asked.command,
                limits=_limits(asked, task),
                is_unsafe_allowed=asked.is_unsafe_allowed,
            )
            async with open_stage(settings, {"s0": chosen.engine}) as stage:
                played = await play(stage, task)
                records = stage.records()
                await asyncio.to_thread(_keep, stage, played, chosen.model, asked.keep)
    return report_of(profile.name, played, records, must_solve=asked.model is None)


def _limits(asked: TryAsked, task: Task) -> Limits:
    limits = Limits(wall_s=asked.timeout_s)
    if task.agent_wall_s is None:
        return limits
    return replace(limits, wall_s=min(limits.wall_s, task.agent_wall_s))


@contextlib.asynccontextmanager
async def _open_engine(asked: TryAsked, task: Task, scratch: Path) -> AsyncIterator[TryEngine]:
    if asked.engine is not None:
        async with served_try_engine(asked.engine, Path(asked.model or "")) as engine:
            yield engine
        return
    if asked.model is not None:
        async with embedded_try_engine(asked.model) as engine:
            yield engine
        return
    solution = solution_of(task.folder)
    if solution is None:
        raise ConfigError(
            f"{task.folder}: has no {SOLUTION_SCRIPT} that a script could run; add it, or let a "
            "model answer with --model"
        )
    solver = ScriptedSolver(commands=(LOOK_AROUND, solution))
    yield scripted_try_engine(solver, scratch / "model")


def _keep(stage: Stage, played: Played, model: Path, target: Path | None) -> None:
    """Copy what the execution left, for `gyre run export`; its own links stay links."""
    if target is None:
        return
    shutil.copytree(played.folder, target, symlinks=True)
    shutil.copytree(stage.tokens, target / "tokens")
    (target / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model / name).is_file():
            shutil.copy(model / name, target / "model")
    write_json(
        target / "config.json",
        {"kind": "gyre harness try", "model": str((target / "model").resolve())},
    )
