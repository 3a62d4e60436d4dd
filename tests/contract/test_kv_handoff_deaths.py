"""Sources and destinations that are processes, killed with -9 at every stage of a handoff."""

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_under_test import prompt_of
from handoff_rig import KINDS, Heard, Kind, ask, cut, engine_of, hear, nothing_left, rest_of
from slow_relay import relay_of

from opengyre.seams.engine import Finish
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRelease
from opengyre.transport.engine_link import RemoteEngine

DEADLINE_S = 60.0
PROGRAM = Path(__file__).with_name("kv_source_process.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """An engine in another process."""

    front: RemoteEngine
    process: subprocess.Popen[str]

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait, DEADLINE_S)


def start(kind: Kind, folder: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), kind.name, f"unix:{folder}/{name}.sock", name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


@asynccontextmanager
async def far_engine(kind: Kind, folder: Path, *, name: str) -> AsyncIterator[Far]:
    with start(kind, folder, name) as process:
        try:
            assert process.stdout is not None
            address = (await asyncio.to_thread(process.stdout.readline)).strip()
            assert address, "the process did not start"
            async with RemoteEngine(address, name=name) as front:
                yield Far(front=front, process=process)
        finally:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture(params=["qwen3-shm", "qwen3-tcp"])
def kind(request: Any) -> Kind:
    return KINDS[request.param]


def shared_mappings() -> int:
    """Memory of engines that this process maps, whoever made it."""
    gc.collect()
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_killed_source_is_done_without(kind: Kind, tmp_path: Path) -> None:
    """It dies after its destination read all, then, another life, before it was read."""

    async def main() -> None:
        asked = ask(prompt_of(40), 60, temperature=1.0, seed=6)
        async with (
            asyncio.timeout(DEADLINE_S),
            far_engine(kind, tmp_path, name="s") as source,
            engine_of(kind, name="d") as destination,
            engine_of(kind, name="a") as alone,
        ):
            whole = await hear(alone.submit(asked))
            first = await cut(source.front, asked, 5)
            other = ask(prompt_of(41), 60, name="r1", execution="e000002")
            second = await cut(source.front, other, 5)
            assert first.ref.ref != second.ref.ref
            rest = await hear(destination.submit(rest_of(asked, first, kv=first.ref)))
            assert rest.taken is not None
            assert (rest.taken.num_tokens, rest.taken.reason) == (first.ref.num_tokens, "")
            assert first.ids + rest.ids == whole.ids
            await source.kill()
            with pytest.raises(BoundaryError):
                await source.front.release_kv(first.ref.ref)
            last = await hear(destination.submit(rest_of(other, second, kv=second.ref)))
            assert last.taken is not None
            assert (last.taken.num_tokens, bool(last.taken.reason)) == (0, True)
            assert second.ids + last.ids == (await hear(alone.submit(other))).ids
            await nothing_left(destination)

    asyncio.run(main())


def test_a_source_killed_inside_a_read_is_done_without(tmp_path: Path) -> None:
    """What it had sent before may still arrive, and is right; the rest never does."""
    kind = KINDS["llama-tcp"]

    async def main() -> None:
        asked = ask(prompt_of(40), 60, temperature=1.0, seed=6)
        async with (
            asyncio.timeout(DEADLINE_S),
            far_engine(kind, tmp_path, name="s") as source,
            engine_of(kind, name="d") as destination,
        ):
            first = await cut(source.front, asked, 5)
            async with relay_of(first.ref, pass_bytes=3000) as (relay, ref):
                rest = rest_of(asked, first, kv=ref)
                reading = asyncio.ensure_future(hear(destination.submit(rest)))
                await asyncio.wait_for(relay.held.wait(), 10)
                await source.kill()
                relay.let_go()
                made = await reading
            assert made.taken is not None
            assert made.taken.num_tokens in (0, ref.num_tokens)
            assert made.finish is Finish.LENGTH
            alone = await hear(destination.submit(asked))
            assert first.ids + made.ids == alone.ids
            await nothing_left(destination)

    asyncio.run(main())


def test_a_killed_destination_leaves_the_prefix_for_the_next_one(
    kind: Kind, tmp_path: Path
) -> None:
    async def main() -> None:
        asked = ask(prompt_of(40), 60, temperature=1.0, seed=6)
        async with (
            asyncio.timeout(DEADLINE_S),
            far_engine(kind, tmp_path, name="d") as destination,
            engine_of(kind, name="s") as source,
            engine_of(kind, name="t") as third,
        ):
            first = await cut(source, asked, 5)
            rest = rest_of(asked, first, kv=first.ref)
            stream = destination.front.submit(rest)
            heard = Heard()
            while heard.taken is None:
                heard.note(await anext(stream))
            await destination.kill()
            await hear(stream, heard)
            assert heard.finish is Finish.ERROR
            assert source.stats().num_pinned == 1
            last = await hear(third.submit(rest))
            assert last.taken is not None
            assert last.taken.num_tokens == first.ref.num_tokens
            assert heard.ids == last.ids[: len(heard.ids)]
            assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
            whole = await hear(third.submit(rest_of(asked, Heard(), kv=None)))
            assert first.ids + last.ids == whole.ids
            await nothing_left(source)
            await nothing_left(third)

    asyncio.run(main())


def test_many_handoffs_leave_no_file_or_mapping(kind: Kind) -> None:
    async def handoffs(num_handoffs: int) -> tuple[int, int]:
        async with (
            asyncio.timeout(DEADLINE_S),
            engine_of(kind, name="s") as source,
            engine_of(kind, name="d") as destination,
        ):
            for n in range(num_handoffs):
                asked = ask(prompt_of(40, seed=n), 30, name=f"r{n}", execution=f"e{n}")
                first = await cut(source, asked, 2)
                rest = await hear(destination.submit(rest_of(asked, first, kv=first.ref)))
                assert rest.taken is not None
                assert rest.taken.num_tokens > 0
                await source.release_kv(first.ref.ref)
            return open_files(), shared_mappings()

    def left() -> tuple[int, int]:
        return open_files(), shared_mappings()

    before = left()
    few = asyncio.run(handoffs(2))
    assert left() == before
    assert asyncio.run(handoffs(15)) == few
    assert left() == before
