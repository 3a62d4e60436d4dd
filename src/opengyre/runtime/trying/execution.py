"""One execution of one harness, from launch to verdict, without a run: `gyre harness try`.

Owns: wiring sandbox, gateway, engine and grader in one process, and judging what was seen. Must
not know: protocols, scheduling. Invariants: nothing of the execution is left when `play` returns;
what is reported was recorded by the gateway, never taken from the harness's own words.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.config.harness_profile import HarnessProfile
from opengyre.config.watched import WATCHED_PATTERN
from opengyre.gateway.call_counts import watched_regex
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.harness.profiles import Staged, open_harness, stage_agent
from opengyre.harness.programs import Program
from opengyre.harness.selftest import open_sandbox
from opengyre.runtime.executions import make_folders
from opengyre.runtime.folders import meeting_places
from opengyre.runtime.label_rules import label_rules
from opengyre.seams.engine import RequestEngine
from opengyre.seams.harness import Harness, HarnessJob, LaunchResult, Limits, Sandbox
from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.seams.tasks import Grader, Task, Verdict
from opengyre.store.segments import SegmentReader, SegmentWriter
from opengyre.tasks.grader import ScriptGrader

EXECUTION = "e000001"
MODEL_NAME = "policy"
TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """`model` is the folder whose tokenizer and chat format are used; `command` is for the profile
    of that name. `max_turns` and `max_new_tokens` bound the bundled agent."""

    profile: HarnessProfile
    program: Program | None
    model: Path
    context_tokens: int
    command: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_turns: int = 50
    max_new_tokens: int = 2048
    is_unsafe_allowed: bool = False
    hold_comment_s: float = 8.0
    hold_max_s: float = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything one execution after another needs. `turns` are the gateway's records so far."""

    gateway: Gateway
    sandbox: Sandbox
    harness: Harness
    grader: Grader
    limits: Limits
    work: Path
    first_engine: str
    turns: list[TurnRecord]

    @property
    def tokens(self) -> Path:
        """The folder of its token records."""
        return self.work / TOKENS

    def records(self) -> list[TokenRecord]:
        """What is durable so far, in the order in which it was told."""
        reader = SegmentReader(self.tokens)
        return [reader.read(turn.ref) for turn in self.turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How it ended and what its grader said; `folder` holds its workspace and its home."""

    result: LaunchResult
    verdict: Verdict
    folder: Path


@contextlib.asynccontextmanager
async def open_stage(
    settings: StageSettings, engines: Mapping[str, RequestEngine]
) -> AsyncIterator[Stage]:
    """Sandbox, gateway over `engines`, harness. Raises ConfigError for what the user can mend."""
    async with contextlib.AsyncExitStack() as stack:
        _, _, work = stack.enter_context(meeting_places())
        agent = stage_agent(work / "agent")
        program = settings.program
        opened = await stack.enter_async_context(
            open_sandbox(
                work,
                read_only_paths=(agent, *(() if program is None else program.all_paths)),
                is_unsafe_allowed=settings.is_unsafe_allowed,
            )
        )
        staged = Staged(
            python=opened.report.python, python_paths=opened.report.python_paths, gyre_agent=agent
        )
        turns: list[TurnRecord] = []
        gateway = await stack.enter_async_context(_open_gateway(settings, work, turns))
        for engine_id, engine in engines.items():
            gateway.connect_engine(engine_id, engine, 0)
        yield Stage(
            gateway=gateway,
            sandbox=opened.sandbox,
            harness=_harness(settings, staged),
            grader=ScriptGrader(run=opened.sandbox.run, limits=settings.limits),
            limits=settings.limits,
            work=work,
            first_engine=next(iter(engines)),
            turns=turns,
        )


@contextlib.asynccontextmanager
async def _open_gateway(
    settings: StageSettings, work: Path, turns: list[TurnRecord]
) -> AsyncIterator[Gateway]:
    tokens = work / TOKENS
    tokens.mkdir()
    recorder = SegmentWriter(tokens)
    events = GatewayEvents(
        on_turn=turns.append, on_hold=lambda *_: None, on_continued=lambda _: None
    )
    try:
        async with Gateway(
            GatewaySettings(
                max_context_tokens=settings.context_tokens,
                model=MODEL_NAME,
                labels=label_rules(settings.profile),
                watched=watched_regex(WATCHED_PATTERN),
                hold_comment_s=settings.hold_comment_s,
                hold_max_s=settings.hold_max_s,
            ),
            renderer=load_renderer(settings.model),
            recorder=recorder,
            events=events,
        ) as gateway:
            yield gateway
    finally:
        await recorder.close()


def _harness(settings: StageSettings, staged: Staged) -> Harness:
    return open_harness(
        settings.profile,
        settings.program,
        staged=staged,
        settings={
            "max_turns": str(settings.max_turns),
            "max_new_tokens": str(settings.max_new_tokens),
            "context_tokens": str(settings.context_tokens),
        },
        command=settings.command,
    )


async def play(
    stage: Stage, task: Task, *, execution: str = EXECUTION, address: str | None = None
) -> Played:
    """One execution of `task`, with its session routed to the first engine.

    `address` stands for the gateway's, for whoever sits between harness and gateway.
    """
    key = secrets.token_urlsafe(24)
    folder = stage.work / execution
    await asyncio.to_thread(make_folders, folder, task)
    stage.gateway.open_session(execution, key, stage.first_engine, seed=1)
    try:
        job = HarnessJob(
            execution=execution,
            instruction=task.instruction,
            workspace=folder / "workspace",
            private_tmp=folder / "tmp",
            base_url=f"{address or stage.gateway.address}/{execution}/v1",
            api_key=key,
            model=MODEL_NAME,
            limits=stage.limits,
        )
        result = await stage.sandbox.run(stage.harness.prepare(job))
    finally:
        await stage.gateway.close_session(execution)
    scratch = folder / "grade"
    await asyncio.to_thread(scratch.mkdir)
    verdict = await stage.grader.grade(task, workspace=folder / "workspace", scratch=scratch)
    return Played(result=result, verdict=verdict, folder=folder)
