"""The sandbox of a seeded world: launches agents as hosts, and plays the grader's script.

Implements seams.harness.Sandbox with the deadlines and endings of the real one. Must not know:
groups, engines. Invariant: when a result is there, nothing of the launch runs any more.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from opengyre.seams.harness import (
    Ending,
    HeldClock,
    LaunchResult,
    LaunchSpec,
    never_held,
)
from tests.sim.seeded_agent import Agent, Crash, Habits
from tests.sim.seeded_hosts import WorldLoop
from tests.sim.seeded_loop import Host


class SeededSandbox:
    """`wrong(words)` is told of broken promises; `on_launch(execution)` of each agent started."""

    def __init__(
        self,
        loop: WorldLoop,
        *,
        habits: Habits,
        lost_rate: float,
        grader_fail_rate: float,
        wrong: Callable[[str], None],
        was_killed: Callable[[str, float], bool],
    ) -> None:
        self._loop = loop
        self._habits = habits
        self._lost_rate = lost_rate
        self._grader_fail_rate = grader_fail_rate
        self._wrong = wrong
        self._was_killed = was_killed
        self._num_launches = 0
        self.on_launch: Callable[[str], None] = lambda execution: None
        self.num_answers = 0
        self.running: dict[str, Host] = {}

    async def run(
        self,
        spec: LaunchSpec,
        *,
        held_s: HeldClock = never_held,
        stop: asyncio.Event | None = None,
    ) -> LaunchResult:
        await asyncio.sleep(self._loop.delay_s("launch"))
        if "GYRE_VERIFIER_DIR" in spec.env:
            return self._grade(spec)
        self._num_launches += 1
        self.on_launch(spec.execution)
        if self._loop.world.random() < self._lost_rate:
            return _result(Ending.LOST, "its supervisor died")
        return await self._play(spec, held_s, stop or asyncio.Event())

    def _grade(self, spec: LaunchSpec) -> LaunchResult:
        if self._loop.world.random() < self._grader_fail_rate:
            return _result(Ending.MEMORY_LIMIT, "the grader was too large")
        reward = self._loop.world.choice([0.0, 0.5, 1.0])
        Path(spec.env["GYRE_VERIFIER_DIR"], "reward.txt").write_text(f"{reward}\n")
        return _result(Ending.EXITED, "exit code 0", exit_code=0)

    async def _play(self, spec: LaunchSpec, held_s: HeldClock, stop: asyncio.Event) -> LaunchResult:
        name = f"agent-{spec.execution}-{self._num_launches}"
        agent = Agent(
            dict(spec.env),
            execution=spec.execution,
            habits=self._habits,
            rng=Random(f"{self._loop.world.random()}"),
            wrong=self._wrong,
            was_killed=self._was_killed,
        )
        ended = asyncio.Event()
        codes: list[int] = []

        async def body() -> None:
            try:
                await agent.play()
                codes.append(0)
            except* Crash:
                codes.append(1)
            finally:
                ended.set()

        host = self._loop.start_host(name, body)
        self.running[spec.execution] = host
        try:
            cause = await self._until(spec, held_s, stop=stop, ended=ended)
        finally:
            self._loop.kill_host(host)
            del self.running[spec.execution]
            self.num_answers += agent.num_answers
        if cause is not None:
            return _result(cause, "ended by us")
        return _result(Ending.EXITED, f"exit code {codes[0]}", exit_code=codes[0])

    async def _until(
        self, spec: LaunchSpec, held_s: HeldClock, *, stop: asyncio.Event, ended: asyncio.Event
    ) -> Ending | None:
        """Until it ended (None), or why it has to end; the deadline moves while it is held."""
        started_s = self._loop.time()
        waits = [asyncio.create_task(ended.wait()), asyncio.create_task(stop.wait())]
        try:
            while True:
                left_s = started_s + spec.limits.wall_s + held_s() - self._loop.time()
                if ended.is_set():
                    return None
                if stop.is_set() or left_s <= 0:
                    return Ending.CANCELLED if stop.is_set() else Ending.TIMED_OUT
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)


def _result(ending: Ending, reason: str, *, exit_code: int | None = None) -> LaunchResult:
    return LaunchResult(
        ending=ending,
        exit_code=exit_code,
        signal=None,
        output_tail="",
        num_output_bytes=0,
        wall_s=0.0,
        reason=reason,
    )
