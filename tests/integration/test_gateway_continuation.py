"""Turns that engines cannot finish: the client sees one request and one unbroken answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from gateway_rig import TOOLS, CutEngine, Rig, open_rig, scripted, until

from opengyre.seams.engine import Chunk, Finish, GenerateRequest
from opengyre.seams.records import TurnRecord

HELLO = [{"role": "user", "content": "say hello"}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat log/10 é"}}\n</tool_call>'
ANSWER = "Wörter und 😀 zuerst.\n\n" + CALL


def cut(num_tokens: int, **more: Any) -> CutEngine:
    return CutEngine(scripted(lambda text, seed: ANSWER), num_tokens=num_tokens, **more)


async def until_reset(reader: asyncio.StreamReader) -> bytes:
    """What still comes before the connection is reset; an orderly end fails the test."""
    seen = b""
    try:
        while part := await reader.read(1000):
            seen += part
    except ConnectionResetError:
        return seen
    pytest.fail(f"a clean end after {seen!r}")


async def read_all(rig: Rig, *, is_stream: bool) -> None:
    async with (
        httpx.AsyncClient() as client,
        client.stream(
            "POST",
            f"{rig.gateway.address}/e000001/v1/chat/completions",
            headers={"authorization": "Bearer key-1"},
            json={"messages": HELLO, "stream": is_stream},
        ) as response,
    ):
        await response.aread()


def number(turn: TurnRecord) -> int:
    return int(turn.execution[1:])


async def streamed(
    rig: Rig, *, execution: str = "e000001", key: str = "key-1", **more: Any
) -> tuple[str, str, str]:
    """(text, arguments, finish_reason) of one streamed call."""
    text, arguments, finish = "", "", ""
    async with rig.client(execution, key) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, stream=True, **more
        )
        async for chunk in stream:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                arguments += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return text, arguments, finish


async def unbroken() -> tuple[tuple[str, str, str], list[int], list[float]]:
    async with open_rig({"s0": scripted(lambda text, seed: ANSWER)}) as rig:
        answer = await streamed(rig)
        await rig.gateway.close_session("e000001")
        (record,) = rig.recorder.records
        return answer, record.completion_ids, record.logprobs


@pytest.mark.parametrize("finish", [Finish.FROZEN, Finish.ERROR])
def test_a_cut_at_any_token_leaves_the_same_ids_and_one_stream(finish: Finish) -> None:
    async def main() -> None:
        answer, ids, logprobs = await unbroken()
        assert answer == ("Wörter und 😀 zuerst.", '{"command": "cat log/10 é"}', "tool_calls")
        num = len(ids) + 1
        engines = {f"s{k}": cut(k, finish=finish, num_cuts=1) for k in range(num)}
        async with open_rig(engines) as rig:
            for k in range(num):
                rig.gateway.open_session(f"e{k}", f"key-{k}", f"s{k}", seed=7)
            calls = [streamed(rig, execution=f"e{k}", key=f"key-{k}") for k in range(num)]
            assert set(await asyncio.gather(*calls)) == {answer}
            for k in range(num):
                await rig.gateway.close_session(f"e{k}")
            assert len(rig.recorder.records) == num
            for record in rig.recorder.records:
                assert record.completion_ids == ids, record.header
                assert record.logprobs == logprobs
            is_moved = [turn.num_continuations for turn in sorted(rig.told, key=number)]
            assert is_moved == [1] * len(ids) + [0]
            assert len(rig.continued) == len(ids)

    asyncio.run(main())


def test_a_cut_after_every_token_keeps_the_turns_budget_and_seed() -> None:
    async def main() -> None:
        _, ids, _ = await unbroken()
        engine = cut(1)
        async with open_rig({"s0": engine}) as rig:
            _, _, finish = await streamed(rig, max_tokens=10)
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert finish == record.header.finish == "length"
            assert record.completion_ids == ids[:10]
            assert [r.max_new_tokens for r in engine.requests] == list(range(10, 0, -1))
            assert len({r.seed for r in engine.requests}) == 1
            assert len({r.request_id for r in engine.requests}) == 10

    asyncio.run(main())


def test_a_publication_in_mid_turn_gives_spans_of_two_versions() -> None:
    async def main() -> None:
        answer, ids, _ = await unbroken()
        engine = scripted(lambda text, seed: ANSWER, tokens_per_s=30)
        async with open_rig({"s0": engine}) as rig:
            call = asyncio.create_task(streamed(rig))
            await until(lambda: engine.stats().num_generated_tokens >= 3)
            rig.gateway.close_door("s0")
            await engine.freeze_all()
            await engine.pause()
            await engine.begin_update(1)
            await engine.commit(1)
            await engine.resume()
            await until(lambda: rig.gateway.held() == {"e000001": 1})
            await asyncio.sleep(0.05)
            rig.gateway.open_door("s0")
            assert await call == answer
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert record.completion_ids == ids
            assert [span.policy_version for span in record.header.spans] == [0, 1]
            assert record.header.spans[0].end == record.header.spans[1].start
            assert record.header.spans[1].end == len(ids)
            assert rig.holds == [("e000001", True), ("e000001", False)]
            assert record.header.held_s >= 0.05

    asyncio.run(main())


def test_a_lost_engine_hands_its_running_turn_to_the_next_route() -> None:
    async def main() -> None:
        engines = {
            "c1": scripted(lambda text, seed: ANSWER, tokens_per_s=20),
            "s0": scripted(lambda text, seed: ANSWER),
        }
        answer, ids, _ = await unbroken()
        async with open_rig(engines) as rig:
            call = asyncio.create_task(streamed(rig))
            await until(lambda: engines["c1"].stats().num_generated_tokens >= 3)
            rig.gateway.engine_lost("c1")
            await until(lambda: rig.gateway.held() == {"e000001": 1})
            rig.gateway.set_routes({"e000001": "s0"})
            assert await call == answer
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert record.completion_ids == ids
            assert [span.engine for span in record.header.spans] == ["c1", "s0"]
            (move,) = rig.continued
            assert (move.from_engine, move.to_engine) == ("c1", "s0")
            assert move.num_tokens_so_far == record.header.spans[0].end
            await until(lambda: engines["c1"].stats().num_running == 0)

    asyncio.run(main())


def test_a_request_held_for_seconds_gets_comments_and_then_its_answer() -> None:
    async def main() -> None:
        async with open_rig(
            {"s0": scripted(lambda text, seed: "hello")}, hold_comment_s=0.5
        ) as rig:
            rig.gateway.close_door("s0")
            asyncio.get_running_loop().call_later(3.0, rig.gateway.open_door, "s0")
            async with (
                httpx.AsyncClient() as client,
                client.stream(
                    "POST",
                    f"{rig.gateway.address}/e000001/v1/chat/completions",
                    headers={"authorization": "Bearer key-1"},
                    json={"messages": HELLO, "stream": True},
                ) as response,
            ):
                lines = [line async for line in response.aiter_lines() if line]
            assert 2 <= lines.count(": held") <= 6
            assert lines[-1] == "data: [DONE]"
            await rig.gateway.close_session("e000001")
            assert 1.5 < rig.told[0].held_s < 4

    asyncio.run(main())


def test_a_hold_beyond_its_limit_is_503_before_the_first_byte_and_a_reset_after_it() -> None:
    async def main() -> None:
        rigged = open_rig(
            {"s0": scripted(lambda text, seed: "hello")}, hold_max_s=0.4, hold_comment_s=0.1
        )
        async with rigged as rig, rig.client() as client:
            rig.gateway.close_door("s0")
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model="m", messages=HELLO)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "5"
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, openai.APIError)):
                await streamed(rig)
            await rig.gateway.close_session("e000001")
            ends = [(turn.finish, turn.is_committed) for turn in rig.told]
            assert ends == [("error", False), ("error", False)]
            assert rig.gateway.held() == {}

    asyncio.run(main())


def test_what_cannot_go_on_is_reset_and_never_looks_like_an_end() -> None:
    async def main() -> None:
        engine = CutEngine(scripted(lambda text, seed: ANSWER), num_tokens=5, num_cuts=1)
        async with open_rig({"s0": engine}, hold_max_s=0.3) as rig:
            reader, writer = await asyncio.open_connection(rig.gateway.host, rig.gateway.port)
            body = json.dumps({"messages": HELLO, "stream": True}).encode()
            writer.write(
                b"POST /e000001/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"authorization: Bearer key-1\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            seen = await reader.readuntil(b'"content":"W')
            rig.gateway.close_door("s0")
            seen += await until_reset(reader)
            assert b"[DONE]" not in seen
            assert b"\r\n0\r\n" not in seen
            writer.close()
            await rig.gateway.close_session("e000001")
            (turn,) = rig.told
            assert (turn.finish, turn.is_committed) == ("error", False)
            assert turn.num_completion_tokens == 5

    asyncio.run(main())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_cancelled_at_the_engine(is_stream: bool) -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "word " * 500, tokens_per_s=100)
        async with open_rig({"s0": engine}) as rig:
            client = asyncio.create_task(read_all(rig, is_stream=is_stream))
            await until(lambda: engine.stats().num_generated_tokens >= 3)
            client.cancel()
            await until(lambda: engine.stats().num_running == 0)
            assert engine.stats().num_generated_tokens < 500
            await rig.gateway.close_session("e000001")
            (turn,) = rig.told
            assert (turn.finish, turn.is_committed) == ("cancelled", False)
            assert turn.num_completion_tokens > 0

    asyncio.run(main())


def test_closing_a_session_cuts_its_clients_and_its_requests_and_revokes_the_key() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "word " * 500, tokens_per_s=100)
        async with open_rig({"s0": engine}) as rig:
            call = asyncio.create_task(streamed(rig))
            await until(lambda: engine.stats().num_generated_tokens >= 3)
            counts = await rig.gateway.close_session("e000001")
            assert (counts.num_turns, counts.num_cancelled) == (1, 1)
            assert engine.stats().num_running == 0
            assert [turn.finish for turn in rig.told] == ["cancelled"]
            with pytest.raises((httpx.TransportError, openai.APIError)):
                await call
            with pytest.raises(openai.AuthenticationError):
                await streamed(rig)

    asyncio.run(main())


class LyingEngine(CutEngine):
    """Its third chunk of a first part is `lie`; afterwards it is honest."""

    def __init__(self, inner: Any, lie: Chunk) -> None:
        super().__init__(inner, num_tokens=0, num_cuts=0)
        self._lie = lie

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        is_first = not self.requests
        num_chunks = 0
        async for chunk in super().submit(request):
            num_chunks += 1
            yield self._lie if is_first and num_chunks == 3 else chunk


@pytest.mark.parametrize(
    "lie",
    [
        Chunk(ids=[-1], logprobs=[-0.5]),
        Chunk(ids=[10**6], logprobs=[-0.5]),
        Chunk(ids=[2**31], logprobs=[-0.5]),
        Chunk(ids=[5], logprobs=[float("nan")]),
        Chunk(ids=[5], logprobs=[-1e39]),
        Chunk(ids=[5], logprobs=[3.0]),
        Chunk(ids=[5, 6], logprobs=[-0.5]),
    ],
)
def test_what_an_engine_cannot_have_sampled_is_not_taken(lie: Chunk) -> None:
    async def main() -> None:
        engine: Any = LyingEngine(scripted(lambda text, seed: ANSWER), lie)
        async with open_rig({"s0": engine}) as rig:
            text, arguments, finish = await streamed(rig)
            assert (text, finish) == ("Wörter und 😀 zuerst.", "tool_calls")
            assert json.loads(arguments) == {"command": "cat log/10 é"}
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert record.header.num_continuations == 1
            assert all(-30 < one <= 0 for one in record.logprobs)

    asyncio.run(main())


def test_more_tokens_than_were_asked_for_end_the_answer_at_its_budget() -> None:
    async def main() -> None:
        many = Chunk(ids=[5] * 100, logprobs=[-0.5] * 100)
        engine: Any = LyingEngine(scripted(lambda text, seed: ANSWER), many)
        async with open_rig({"s0": engine}) as rig:
            assert (await streamed(rig, max_tokens=9))[2] == "length"
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert len(record.completion_ids) == len(record.logprobs) == 9

    asyncio.run(main())


class RefusingEngine(CutEngine):
    """Says that it cannot serve what it is asked."""

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        yield Chunk(finish=Finish.REFUSED, reason="HTTP 400: no such thing")


def test_what_engines_refuse_for_good_is_refused_at_once_with_their_words() -> None:
    async def main() -> None:
        engine: Any = RefusingEngine(scripted(lambda text, seed: ANSWER), num_tokens=0)
        async with open_rig({"s0": engine}) as rig, rig.client() as client:
            with pytest.raises(openai.BadRequestError, match="no such thing"):
                await client.chat.completions.create(model="m", messages=HELLO)
            assert len(engine.requests) == 2

    asyncio.run(main())
