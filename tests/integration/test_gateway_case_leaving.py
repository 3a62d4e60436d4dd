"""Case 11: a client that leaves is cancelled at the engine; one that has it all has not left."""

import asyncio
import json
import socket
import struct
import time

import pytest
from cases_rig import ANSWER, EACH_PROTOCOL, EACH_WAY, Case, Harness, open_case, witness
from cases_speakers import Said, Speaker
from gateway_rig import until

RESET = struct.pack("ii", 1, 0)
LONG = "word " * 600
TERMINAL = {
    "openai-chat": b"data: [DONE]\n\n",
    "openai-responses": b"event: response.completed\n",
    "anthropic": b"event: message_stop\n",
}
LEAVES = ["orderly", "reset"]


class RawClient:
    """A client that can leave in the middle of whatever it does."""

    def __init__(self, one: Harness, *, stream: bool) -> None:
        self._address = (one.rig.gateway.host, one.rig.gateway.port)
        body = json.dumps(one.body(stream=stream)).encode()
        path = one.url.removeprefix(one.rig.gateway.address)
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in one.headers.items()]
        self.request = "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(*self._address)

    async def ask(self) -> None:
        await self.connect()
        self.writer.write(self.request)

    async def see(self, wanted: bytes) -> bytes:
        return await self.reader.readuntil(wanted)

    async def leave(self, how: str) -> None:
        sock: socket.socket = self.writer.get_extra_info("socket")
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()
        self.writer.close()


async def one_whole_turn(case: Case, speaker: Speaker) -> None:
    """So that something is trained: what was left is not."""
    await case.harness(speaker, history=[Said(role="user", text="short")]).ask(stream=False)


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("how", LEAVES)
def test_case_11_a_client_that_leaves_is_cancelled_at_the_engine_within_seconds(
    speaker: Speaker, stream: bool, how: str
) -> None:
    async def main() -> None:
        engine = witness(lambda text, s: "ok" if "short" in text else LONG, tokens_per_s=100)
        async with open_case({"s0": engine}) as case:
            client = RawClient(case.harness(speaker), stream=stream)
            await client.ask()
            await until(lambda: engine.inner.stats().num_generated_tokens >= 3)
            left_s = time.monotonic()
            await client.leave(how)
            await until(lambda: engine.inner.stats().num_running == 0)
            assert time.monotonic() - left_s < 2
            assert len(engine.cancelled) == 1
            await one_whole_turn(case, speaker)
            await case.close()
            turn = case.rig.told[0]
            assert (turn.finish, turn.is_committed) == ("cancelled", False)
            assert 0 < turn.num_completion_tokens < 600

    asyncio.run(main())


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("how", LEAVES)
def test_case_11_a_client_that_leaves_while_it_is_held_is_no_longer_held_or_served(
    speaker: Speaker, stream: bool, how: str
) -> None:
    async def main() -> None:
        engine = witness(lambda text, seed: ANSWER)
        async with open_case({"s0": engine}, hold_comment_s=0.1) as case:
            case.rig.gateway.close_door("s0")
            client = RawClient(case.harness(speaker), stream=stream)
            await client.ask()
            if stream:
                await client.see(b": ")
            await until(lambda: case.rig.gateway.held())
            await client.leave(how)
            await until(lambda: case.rig.gateway.held() == {})
            case.rig.gateway.open_door("s0")
            await one_whole_turn(case, speaker)
            assert len(engine.requests) == 1
            await case.close()
            assert [turn.is_committed for turn in case.rig.told] == [False, True]

    asyncio.run(main())


@EACH_PROTOCOL
@pytest.mark.parametrize("how", LEAVES)
def test_case_11_a_close_right_after_the_terminal_event_is_a_whole_turn(
    speaker: Speaker, how: str
) -> None:
    """Codex does so; a new connection for each request. Its next turns go on from these."""

    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            for _ in range(10):
                client = RawClient(one, stream=True)
                await client.ask()
                await client.see(TERMINAL[speaker.name])
                await client.leave(how)
                reply = await other_client(case, speaker, one)
                one.keep(reply, speaker.as_harness(reply.sent_back), "result")
            await case.close()
            told = case.rig.told
            assert len(told) == 20
            assert all(turn.is_committed and turn.attempt == 0 for turn in told)
            assert {turn.fork_reason for turn in told[2:]} == {""}
            assert all(turn.parent for turn in told[2:])

    asyncio.run(main())


async def other_client(case: Case, speaker: Speaker, one: Harness) -> object:
    """The same history again, honestly: another turn."""
    return await case.harness(speaker, history=list(one.history)).ask(stream=True)


@EACH_PROTOCOL
def test_case_11_a_body_that_is_cut_is_no_turn(speaker: Speaker) -> None:
    async def main() -> None:
        engine = witness(lambda text, seed: ANSWER)
        async with open_case({"s0": engine}) as case:
            client = RawClient(case.harness(speaker), stream=True)
            await client.connect()
            client.writer.write(client.request[:-5])
            await client.writer.drain()
            await client.leave("orderly")
            await one_whole_turn(case, speaker)
            assert len(engine.requests) == 1
            await case.close()
            assert [turn.turn for turn in case.rig.told] == ["e000001.t1"]

    asyncio.run(main())
