"""Connections that never say what they want."""

import asyncio
import resource

import httpx
from gateway_rig import open_rig, scripted

NUM_FILES = 200


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes, whether the end is a reset or not."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def test_the_longest_silent_connection_makes_room_for_those_that_speak() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            address = (rig.gateway.host, rig.gateway.port)
            silent = [await asyncio.open_connection(*address) for _ in range(NUM_FILES // 2)]
            first, _ = silent[0]
            _, half = silent[-1]
            half.write(b"POST /e000001/v1/models HTTP/1.1\r\nhost:")
            async with asyncio.timeout(5):
                assert await end_of(first) == b""
            async with httpx.AsyncClient() as client:
                answer = await client.get(
                    f"{rig.gateway.address}/e000001/v1/models",
                    headers={"authorization": "Bearer key-1"},
                )
            assert answer.status_code == 200
            for _, writer in silent:
                writer.transport.abort()

    known = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, known[1]))
    try:
        asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, known)


def test_a_connection_without_a_whole_head_is_closed_in_time() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "hi")
        async with open_rig({"s0": engine}, head_timeout_s=0.2) as rig:
            address = (rig.gateway.host, rig.gateway.port)
            for begun in (b"", b"GET /e000001/v1/models HTTP/1.1\r\nhost: x\r\n"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(begun)
                async with asyncio.timeout(5):
                    assert await end_of(reader) == b""
                writer.close()

    asyncio.run(main())
