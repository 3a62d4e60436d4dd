"""What the engine link adds to the seam: the door, the fence, and death on either side."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.seams.engine import ENGINE_LOST, Chunk, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVRef, KVRelease
from opengyre.transport.chunk_stream import collect
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_messages import LINK_WIRE, AskCaps, CapsTold, ChunksTold, Submit
from opengyre.transport.engine_server import EngineServer
from opengyre.transport.framed import Peer, serve

DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    engine: ScriptedEngine
    server: EngineServer
    remote: RemoteEngine


@asynccontextmanager
async def linked(address: str, *, tokens_per_s: float = 500.0) -> AsyncIterator[Linked]:
    config = ScriptedConfig(tokens_per_s=tokens_per_s, max_running=8, context_tokens=5000)
    engine = ScriptedEngine(lambda ids, seed: list(range(4000)), config)
    async with (
        asyncio.timeout(DEADLINE_S),
        EngineServer(engine, address) as server,
        RemoteEngine(server.address, name="e0") as remote,
    ):
        yield Linked(engine=engine, server=server, remote=remote)


def ask(number: int, num_tokens: int = 3000) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}", execution="e1", prompt_ids=[1, 2, 3], max_new_tokens=num_tokens
    )


def play(address: str, scene: Callable[[Linked], Awaitable[None]]) -> None:
    async def main() -> None:
        async with linked(address) as link:
            await scene(link)

    asyncio.run(main())


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/e.sock" if request.param == "unix" else "tcp:127.0.0.1:0"


def test_a_closed_door_answers_frozen_without_tokens_and_an_open_one_serves(address: str) -> None:
    async def scene(link: Linked) -> None:
        link.server.close_door()
        made = await collect(link.remote.submit(ask(1, 5)))
        assert (made.finish, made.ids) == (Finish.FROZEN, [])
        link.server.open_door()
        made = await collect(link.remote.submit(ask(2, 5)))
        assert (made.finish, made.ids) == (Finish.LENGTH, [0, 1, 2, 3, 4])

    play(address, scene)


def test_freezing_at_the_server_returns_after_every_terminal_chunk_was_sent(address: str) -> None:
    async def scene(link: Linked) -> None:
        streams = [link.remote.submit(ask(number)) for number in range(12)]
        num_read = len((await anext(streams[0])).ids)
        link.server.close_door()
        await link.server.freeze_all()
        assert (link.engine.stats().num_running, link.engine.stats().num_waiting) == (0, 0)
        made = await asyncio.gather(*(collect(one) for one in streams))
        assert {one.finish for one in made} == {Finish.FROZEN}
        num_read += sum(len(one.ids) for one in made)
        assert link.engine.stats().num_generated_tokens == num_read

    play(address, scene)


def test_a_freeze_of_one_caller_leaves_the_requests_of_another(address: str) -> None:
    async def scene(link: Linked) -> None:
        async with RemoteEngine(link.server.address, name="other") as other:
            mine, theirs = link.remote.submit(ask(1)), other.submit(ask(2))
            await anext(mine)
            await anext(theirs)
            await link.remote.freeze("r1")
            assert (await collect(mine)).finish is Finish.FROZEN
            assert (await anext(theirs)).finish is None
            await theirs.aclose()

    play(address, scene)


def test_a_lost_engine_ends_each_request_with_one_error_chunk(address: str) -> None:
    async def scene(link: Linked) -> None:
        streams = [link.remote.submit(ask(number)) for number in range(3)]
        for stream in streams:
            assert (await anext(stream)).ids
        await link.server.__aexit__(None, None, None)
        for stream in streams:
            made = await collect(stream)
            assert (made.finish, made.reason) == (Finish.ERROR, ENGINE_LOST)
        assert link.remote.lost.is_set()
        late = await collect(link.remote.submit(ask(9)))
        assert (late.finish, late.reason) == (Finish.ERROR, ENGINE_LOST)
        with pytest.raises(BoundaryError) as caught:
            await link.remote.freeze("r0")
        assert caught.value.retryable

    play(address, scene)


def test_a_caller_that_dies_leaves_nothing_running_at_the_engine(address: str) -> None:
    async def scene(link: Linked) -> None:
        other = RemoteEngine(link.server.address, name="other")
        await other.open()
        stream = other.submit(ask(1))
        await anext(stream)
        await other.close()
        assert (await collect(stream)).reason == ENGINE_LOST
        while link.engine.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert link.engine.stats().num_generated_tokens < 1500, "it was not cancelled but ended"
        assert (await collect(link.remote.submit(ask(2, 3)))).finish is Finish.LENGTH

    play(address, scene)


def test_abandoned_requests_give_nothing_more_and_leave_the_link_usable(address: str) -> None:
    async def scene(link: Linked) -> None:
        for number in range(20):
            stream = link.remote.submit(ask(number))
            await anext(stream)
            await stream.aclose()
            assert [chunk async for chunk in stream] == []
        made = await collect(link.remote.submit(ask(100, 4)))
        assert made.finish is Finish.LENGTH

    play(address, scene)


def test_chunks_of_a_request_that_is_over_are_dropped_and_counted(tmp_path: Path) -> None:
    """An engine that writes on after the terminal chunk, and for requests nobody made."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def handle(message: object) -> CapsTold | None:
            if isinstance(message, AskCaps):
                return CapsTold(caps=ScriptedEngine(lambda ids, seed: []).caps())
            assert isinstance(message, Submit)
            token = Chunk(ids=[7], logprobs=[-1.0])
            over = Chunk(finish=Finish.STOP)
            late = [("r1", token), ("r1", over), ("r1", token), ("r1", over), ("r9", token)]
            peer.notify(ChunksTold(chunks=late))
            return None

        peer = Peer(reader, writer, wire=LINK_WIRE, handler=handle, name="liar")
        await peer.run()

    async def main() -> None:
        server, address = await serve(f"unix:{tmp_path}/liar.sock", on_connection)
        async with server, RemoteEngine(address, name="liar") as remote:
            made = await collect(remote.submit(ask(1)))
            assert (made.ids, made.finish) == ([7], Finish.STOP)
            assert remote.num_fenced_chunks == 3

    asyncio.run(main())


def test_nobody_at_the_address_is_a_retryable_boundary_error(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(BoundaryError, match="cannot connect") as caught:
            await RemoteEngine(f"unix:{tmp_path}/none.sock", name="e7").open()
        assert caught.value.retryable
        assert caught.value.boundary == "e7"

    asyncio.run(main())


def test_closing_a_link_leaves_no_task_and_no_descriptor(tmp_path: Path) -> None:
    async def main() -> None:
        num_open = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with linked(f"unix:{tmp_path}/e.sock") as link:
                stream = link.remote.submit(ask(1))
                await anext(stream)
            assert (await collect(stream)).finish is Finish.ERROR
            await link.engine.pause()
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(os.listdir("/proc/self/fd")) == num_open

    asyncio.run(main())


@asynccontextmanager
async def keeping(address: str) -> AsyncIterator[tuple[EngineServer, ScriptedEngine]]:
    """An engine that keeps the prefixes of idle executions."""
    config = ScriptedConfig(name="e0#1", kv_handoff="on", kv_handoff_idle=True)
    engine = ScriptedEngine(lambda ids, seed: [7, 8, 9], config)
    async with asyncio.timeout(DEADLINE_S), EngineServer(engine, address) as server:
        yield server, engine


def test_idle_prefixes_are_kept_for_who_claims_them_and_for_nobody_else(address: str) -> None:
    async def main() -> None:
        offered: list[list[KVRef]] = []

        def claim_first(refs: list[KVRef]) -> list[str]:
            offered.append(refs)
            return [refs[0].ref]

        async with (
            keeping(address) as (server, engine),
            RemoteEngine(server.address, name="a", on_prefixes=claim_first) as one,
            RemoteEngine(server.address, name="b", on_prefixes=lambda refs: []) as other,
        ):
            for number in range(3):
                request = msgspec.structs.replace(ask(number), execution=f"e{number}")
                assert (await collect(other.submit(request))).ids == [7, 8, 9]
            server.close_door()
            await server.freeze_all()
            assert offered == []
            await server.freeze_all(keeps_kv=True)
            (refs,) = offered
            assert [ref.execution for ref in refs] == ["e0", "e1", "e2"]
            assert [len(ref.ids) for ref in refs] == [6, 6, 6]
            assert engine.stats().num_pinned == 1
            assert await one.release_kv(refs[0].ref) is KVRelease.RELEASED
            assert await other.release_kv(refs[0].ref) is KVRelease.UNKNOWN
            assert engine.stats().num_pinned == 0

    asyncio.run(main())


def test_an_engine_whose_door_is_shut_takes_no_idle_prefix_in(address: str) -> None:
    async def main() -> None:
        async with (
            keeping(address) as (server, engine),
            RemoteEngine(server.address, name="e") as front,
        ):
            assert (await collect(front.submit(ask(1)))).ids == [7, 8, 9]
            (ref,) = await engine.export_kv()
            server.close_door()
            shut = await front.import_kv(ref)
            assert (shut.num_tokens, shut.reason) == (0, "door is closed")
            server.open_door()
            assert (await front.import_kv(ref)).num_tokens == ref.num_tokens

    asyncio.run(main())


def test_a_prefix_travels_with_the_terminal_chunk_and_is_read_through_another_link(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = ScriptedConfig(name="e9#1", kv_handoff="on", tokens_per_s=500.0)
        source = ScriptedEngine(lambda ids, seed: list(range(4000)), config)
        async with (
            keeping(f"unix:{tmp_path}/reader.sock") as (reads, reader),
            EngineServer(source, f"unix:{tmp_path}/source.sock") as keeps,
            RemoteEngine(keeps.address, name="source") as ours,
            RemoteEngine(reads.address, name="reader") as theirs,
        ):
            chunks = ours.submit(ask(1))
            first = await anext(chunks)
            keeps.close_door()
            await ours.freeze("r1", keeps_kv=True)
            rest = await collect(chunks)
            assert rest.finish is Finish.FROZEN
            assert rest.kv is not None
            ids = [1, 2, 3, *first.ids, *rest.ids]
            assert rest.kv.num_tokens == len(ids)
            request = msgspec.structs.replace(ask(2), prompt_ids=ids, kv=rest.kv)
            told = [chunk async for chunk in theirs.submit(request)]
            assert told[0].taken is not None
            assert (told[0].taken.num_tokens, told[0].ids) == (len(ids), [])
            assert reader.stats().num_imported_tokens == len(ids)
            idle = msgspec.structs.replace(rest.kv, ids=ids, digest="of other tokens")
            assert (await theirs.import_kv(idle)).reason == "it is of other tokens"
            assert await ours.release_kv(rest.kv.ref) is KVRelease.RELEASED

    asyncio.run(main())


def test_a_caller_that_hangs_claims_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with keeping(f"unix:{tmp_path}/e.sock") as (server, engine):
            await collect(engine.submit(ask(1)))
            reader, writer = await asyncio.open_unix_connection(server.address[5:])
            await asyncio.sleep(0.05)
            await server.freeze_all(keeps_kv=True)
            assert engine.stats().num_pinned == 0
            writer.close()
            assert await reader.read(4) != b"", "it was asked"

    asyncio.run(main())
