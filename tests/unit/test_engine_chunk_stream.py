"""A request's stream: merged while unread, one terminal chunk, abandonment told once."""

import asyncio
from collections.abc import Awaitable, Callable

from opengyre.seams.engine import Finish
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream, collect


def play(scene: Callable[[ChunkStream, ChunkReader, list[str]], Awaitable[None]]) -> list[str]:
    told: list[str] = []

    async def main() -> None:
        stream = ChunkStream()
        await scene(stream, ChunkReader(stream, on_abandon=lambda: told.append("gone")), told)

    asyncio.run(main())
    return told


def test_unread_tokens_of_one_version_merge_and_versions_stay_apart() -> None:
    async def scene(stream: ChunkStream, reader: ChunkReader, told: list[str]) -> None:
        for token in range(100):
            stream.put([token], [-float(token)], 1)
        stream.put([100], [-100.0], 2)
        stream.end(Finish.STOP, policy_version=2)
        chunks = [chunk async for chunk in reader]
        assert [(len(one.ids), one.policy_version) for one in chunks] == [(100, 1), (1, 2), (0, 2)]
        assert chunks[0].ids == list(range(100))
        assert chunks[0].logprobs[99] == -99.0

    assert play(scene) == []


def test_nothing_is_written_after_the_first_terminal_chunk() -> None:
    async def scene(stream: ChunkStream, reader: ChunkReader, told: list[str]) -> None:
        stream.put([1], [-1.0], 0)
        stream.end(Finish.FROZEN, policy_version=0)
        stream.put([2], [-1.0], 0)
        stream.end(Finish.ERROR, policy_version=0, reason="late")
        made = await collect(reader)
        assert (made.ids, made.finish, made.reason) == ([1], Finish.FROZEN, "")
        assert [chunk async for chunk in reader] == []

    assert play(scene) == []


def test_a_dropped_reader_tells_that_it_is_gone_once() -> None:
    async def scene(stream: ChunkStream, reader: ChunkReader, told: list[str]) -> None:
        stream.put([1], [-1.0], 0)
        assert (await anext(reader)).ids == [1]
        await reader.aclose()
        await reader.aclose()

    assert play(scene) == ["gone"]


def test_a_reader_that_goes_out_of_scope_unread_tells_unless_all_is_over() -> None:
    async def scene(stream: ChunkStream, reader: ChunkReader, told: list[str]) -> None:
        unread = ChunkReader(ChunkStream(), on_abandon=lambda: told.append("unread"))
        del unread
        over = ChunkStream()
        over.end(Finish.STOP, policy_version=0)
        done = ChunkReader(over, on_abandon=lambda: told.append("over"))
        del done
        await asyncio.sleep(0)
        stream.end(Finish.STOP, policy_version=0)

    assert play(scene) == ["unread"]
