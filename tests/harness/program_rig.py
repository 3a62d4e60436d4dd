"""Runs a real agent program through a counting proxy, our gateway and scripted engines."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from struck_engine import Log, Point, Served, Strike, StruckEngine
from tokenizers import Tokenizer
from wire_proxy import Seen, WireProxy

from opengyre.config.harness_profile import HarnessProfile, load_profile
from opengyre.engines.scripted import ScriptedConfig, text_policy
from opengyre.gateway.gateway import Gateway
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter
from opengyre.harness.programs import find_program
from opengyre.runtime.trying.byte_model import byte_tokenizer, write_byte_model
from opengyre.runtime.trying.example_task import write_example_task
from opengyre.runtime.trying.execution import Played, Stage, StageSettings, open_stage, play
from opengyre.runtime.trying.solver import ScriptedSolver
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Ending, Limits
from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.seams.tasks import Task
from opengyre.store.trees import tree_of
from opengyre.tasks.harbor import load_task
from opengyre.trajectory.account import TokenAccount
from opengyre.trajectory.selection import SelectionSettings, select

MISSING = Path(".harnesses/missing")
CONTEXT_TOKENS = 1 << 20
LINES = ("one", "two", "three", "four", "five")
APPENDING = tuple(f"echo {line} >> out" for line in LINES)
"""Each leaves a trace if it runs twice or not at all."""
SOLVER = ScriptedSolver(
    commands=APPENDING,
    thinking="First I look at what there is to do.",
    text="I go on with the next line.\n\n",
    last_words="All lines are there.",
)


def profile_of(name: str) -> HarnessProfile:
    """The profile, if its program is here; else the test is skipped, or fails in CI."""
    profile = load_profile(name)
    try:
        find_program(profile)
    except ConfigError as error:
        reason = MISSING.read_text().strip() if MISSING.is_file() else "run `make harnesses`"
        words = f"{error} ({reason})"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    return profile


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gyre-programs-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@dataclass
class Scene:
    """A program's run that is still to come. `respond` replaces the solver's answers."""

    profile: HarnessProfile
    solver: ScriptedSolver = SOLVER
    respond: Callable[[str, int], str] | None = None
    points: tuple[Point, ...] = ()
    strike: Callable[["Live"], Strike] | None = None
    proxy: Callable[[str], WireProxy] = WireProxy
    tokens_per_s: float = 0.0
    wall_s: float = 90.0
    hold_comment_s: float = 0.5
    instruction: str = "Write the numbers one to five in words into the file out, a line each."

    def run(self) -> "Outcome":
        return asyncio.run(self._run())

    async def _run(self) -> "Outcome":
        with scratch_folder() as folder:
            task = replace(
                load_task(write_example_task(folder / "task")), instruction=self.instruction
            )
            log = Log(points=list(self.points))
            engines = self._engines(log)
            settings = StageSettings(
                profile=self.profile,
                program=find_program(self.profile),
                model=write_byte_model(folder / "model"),
                context_tokens=CONTEXT_TOKENS,
                limits=Limits(wall_s=self.wall_s),
                hold_comment_s=self.hold_comment_s,
            )
            async with asyncio.TaskGroup() as tasks, open_stage(settings, engines) as stage:
                self._arm(Live(gateway=stage.gateway, engines=engines, tasks=tasks))
                return await self._play(stage, task, log)

    def _arm(self, live: "Live") -> None:
        if self.strike is None:
            return
        strike = self.strike(live)
        for engine in live.engines.values():
            engine.strike = strike

    async def _play(self, stage: Stage, task: Task, log: Log) -> "Outcome":
        proxy = self.proxy(stage.gateway.address)
        async with proxy.listening() as address:
            played = await play(stage, task, address=address)
        return outcome_of(stage, played, log=log, proxy=proxy)

    def _engines(self, log: Log) -> dict[str, StruckEngine]:
        tokenizer = byte_tokenizer()
        adapter = TokenizerAdapter(tokenizer, name="bytes", end_of_turn="<|im_end|>")
        respond = text_policy(adapter, self.respond or self.solver.respond)
        config = ScriptedConfig(
            context_tokens=CONTEXT_TOKENS, tokens_per_s=self.tokens_per_s, max_running=32
        )
        decode = decoder(tokenizer)
        return {
            name: StruckEngine(name, respond, config, decode=decode, log=log)
            for name in ("s0", "s1")
        }


def decoder(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


@dataclass
class Live:
    """What a strike can reach."""

    gateway: Gateway
    engines: dict[str, StruckEngine]
    tasks: asyncio.TaskGroup

    def other(self, engine: StruckEngine) -> str:
        return next(name for name in self.engines if name != engine.name)


@dataclass
class Outcome:
    """What a run left: with the harness (`seen`, `files`), in the records, at the engines."""

    played: Played
    turns: list[TurnRecord]
    records: list[TokenRecord]
    served: list[Served]
    struck: list[Point]
    seen: list[Seen]
    files: dict[str, str]

    @property
    def calls(self) -> list[Seen]:
        return [one for one in self.seen if one.is_model_call]

    @property
    def committed(self) -> list[TokenRecord]:
        return [record for record in self.records if record.header.is_committed]

    @property
    def account(self) -> TokenAccount:
        """Where every sampled token ended."""
        settings = SelectionSettings(max_paths=0)
        rng = np.random.default_rng(0)
        return select(tree_of(self.records), settings=settings, rng=rng).account

    def prompt_of(self, record: TokenRecord) -> list[int]:
        """A turn's prompt, restored from records alone."""
        header = record.header
        kept: list[int] = []
        if header.parent:
            parent = next(one for one in self.committed if one.header.turn == header.parent)
            kept = (self.prompt_of(parent) + parent.completion_ids)[: header.num_kept_tokens]
        return kept + record.new_prompt_ids

    def check_ended_well(self) -> None:
        result = self.played.result
        assert (result.ending, result.exit_code) == (Ending.EXITED, 0), result.output_tail[-3000:]

    def check_recorded_exactly(self) -> None:
        """Every committed turn's ids are what engines received and gave, in parts or whole, and
        each sampled token is trained or left out for a reason."""
        assert self.account.is_balanced
        for record in self.committed:
            prompt = self.prompt_of(record)
            parts = [one for one in self.served if one.turn == record.header.turn]
            assert parts, f"{record.header.turn} was never at an engine"
            given: list[int] = []
            logprobs: list[float] = []
            for part in parts:
                if part.request.prompt_ids != prompt + given:
                    given, logprobs = [], []
                assert part.request.prompt_ids == prompt + given
                given, logprobs = given + part.ids, logprobs + part.logprobs
            assert given == record.completion_ids
            assert len(record.logprobs) == len(given)
            assert record.logprobs == pytest.approx(logprobs)

    def check_one_unbroken_branch(self) -> None:
        """Each turn's prompt begins with all that was prompt and answer before (case 2)."""
        before: list[int] = []
        for record in self.committed:
            prompt = self.prompt_of(record)
            assert prompt[: len(before)] == before, record.header.fork_reason
            before = prompt + record.completion_ids


def outcome_of(stage: Stage, played: Played, *, log: Log, proxy: WireProxy) -> Outcome:
    """Read what is there now; the stage's folders go with it."""
    return Outcome(
        played=played,
        turns=list(stage.turns),
        records=stage.records(),
        served=log.served,
        struck=log.struck,
        seen=proxy.seen,
        files=files_in(played.folder / "workspace"),
    )


def files_in(folder: Path) -> dict[str, str]:
    """Text of every file below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
