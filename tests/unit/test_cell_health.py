"""An engine whose requests run and get nowhere ends its process; others are left alone."""

import asyncio
from typing import Any

import pytest

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.runtime import cell_process
from opengyre.runtime.cell_process import MAX_STILL_LOOKS, CellProcess, Progress
from opengyre.runtime.child import Child
from opengyre.runtime.parts import CellParts
from opengyre.seams.engine import EngineStats, GenerateRequest


def _stats(num_running: int, num_generated: int = 0, num_prefill: int = 0) -> EngineStats:
    return EngineStats(
        num_running=num_running,
        num_waiting=0,
        kv_used_bytes=0,
        version=0,
        num_generated_tokens=num_generated,
        num_prefill_tokens=num_prefill,
    )


def test_looks_without_progress_are_counted_while_requests_run() -> None:
    progress = Progress()
    assert [progress.look(_stats(1)) for _ in range(3)] == [0, 1, 2]
    assert progress.look(_stats(1, num_prefill=8)) == 0
    assert progress.look(_stats(1, num_prefill=8)) == 1
    assert progress.look(_stats(1, num_generated=1, num_prefill=8)) == 0


def test_an_idle_engine_is_never_still() -> None:
    progress = Progress()
    assert [progress.look(_stats(0)) for _ in range(3)] == [0, 0, 0]


class _Ended(Exception):
    """The process."""


def test_a_step_that_never_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_process, "HEALTH_EVERY_S", 0.0)
    num_looks = 0
    anything: Any = None

    async def die() -> None:
        raise _Ended

    class Slow(ScriptedEngine):
        def stats(self) -> EngineStats:
            nonlocal num_looks
            num_looks += 1
            return super().stats()

    async def main() -> None:
        engine = Slow(lambda ids, seed: [5], ScriptedConfig(tokens_per_s=1e-6))
        reader = engine.submit(
            GenerateRequest(request_id="r", execution="e", prompt_ids=[1], max_new_tokens=1)
        )
        parts = CellParts(
            engine=engine,
            backend=None,
            compute=anything,
            link=anything,
            pull=anything,
            stages=anything,
        )
        async with asyncio.TaskGroup() as tasks:
            cell = CellProcess(Child("s0", 1, die=die), anything, parts, tasks)
            with pytest.raises(_Ended):
                await cell.watch_health()
        del reader

    asyncio.run(main())
    assert MAX_STILL_LOOKS <= num_looks <= MAX_STILL_LOOKS + 5
