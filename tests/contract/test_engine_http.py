"""The requests part of the engine suite over vLLM's and SGLang's wires, and what HTTP adds."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_under_test import (
    CONTEXT_TOKENS,
    MAX_RUNNING,
    Bench,
    ScriptedSubject,
    all_chunks,
    prompt_of,
    queued_chunks,
    request,
)
from served_app import served
from starlette.responses import Response
from test_engine_contract import (  # noqa: F401  collected here, with this file's `run`
    test_a_cut_at_every_token_continues_identically,
    test_a_full_context_ends_by_length,
    test_a_pause_stops_tokens_and_changes_none,
    test_a_reader_that_stops_cancels_its_request,
    test_a_stop_id_ends_the_stream_and_is_in_it,
    test_a_stream_ends_in_exactly_one_terminal_chunk_without_tokens,
    test_cancel_ends_a_running_and_a_waiting_request_with_one_terminal_chunk,
    test_freeze_and_cancel_are_idempotent_and_take_unknown_ids,
    test_greedy_ids_equal_the_reference,
    test_logprobs_are_those_of_the_sampled_distribution,
    test_requests_in_one_batch_get_what_they_get_alone,
    test_what_cannot_run_is_refused_with_a_reason,
)
from tokenizers import Tokenizer

from opengyre.engines.compute import ComputeThread
from opengyre.engines.http_engine import HttpEngine, ServerFacts, sampling_numbers
from opengyre.engines.http_stream import parse_origin
from opengyre.engines.probe import EngineKind, probe_engine
from opengyre.engines.token_server import ALL_WIRES, TokenServer
from opengyre.engines.vllm import VllmGenerate
from opengyre.seams.engine import Finish
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.transport.chunk_stream import collect

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One way of asking: what the server offers and how its events come."""

    path: str
    kind: EngineKind
    is_incremental: bool = True


WIRES = {
    "vllm-generate": Wire(path="/inference/v1/generate", kind=EngineKind.VLLM),
    "vllm-completions": Wire(path="/v1/completions", kind=EngineKind.VLLM),
    "sglang": Wire(path="/generate", kind=EngineKind.SGLANG),
    "sglang-cumulative": Wire(path="/generate", kind=EngineKind.SGLANG, is_incremental=False),
}
Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@asynccontextmanager
async def open_http_bench(wire: Wire) -> AsyncIterator[Bench]:
    compute = ComputeThread()
    subject = ScriptedSubject()
    engine = subject.make(compute)
    server = TokenServer(
        engine=engine, wires=frozenset([wire.path]), is_incremental=wire.is_incremental
    )
    try:
        async with asyncio.timeout(60), served(server.app()) as url:
            origin = parse_origin(url)
            chosen, facts = await probe_engine(origin)
            assert (chosen.path, chosen.kind) == (wire.path, wire.kind)
            async with HttpEngine(origin, chosen, facts) as front:
                yield Bench(subject=subject, engine=engine, front=front, server=None)
    finally:
        await engine.pause()
        compute.close()


@pytest.fixture(params=list(WIRES))
def run(request: Any) -> Run:
    def run_on_bench(play: Callable[[Bench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with open_http_bench(WIRES[request.param]) as bench:
                await play(bench)

        asyncio.run(main())

    return run_on_bench


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_freeze_stops_the_server_and_the_rest_continues_identically(
    run: Run, num_tokens: int
) -> None:
    async def play(bench: Bench) -> None:
        prompt = prompt_of(8)
        whole = await collect(bench.front.submit(request(0, prompt, 60, seed=3)))
        chunks = bench.front.submit(request(1, prompt, 60, seed=3))
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += (await anext(chunks)).ids
        await bench.front.freeze("r1")
        late = await queued_chunks(chunks)
        assert late[-1].finish is Finish.FROZEN
        ids += [token for chunk in late for token in chunk.ids]
        await bench.until_idle()
        rest = await collect(bench.front.submit(request(2, prompt + ids, 60 - len(ids), seed=3)))
        assert ids + rest.ids == whole.ids

    run(play)


def test_freeze_all_ends_every_stream_and_the_server_hears_of_it(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = [request(number, prompt_of(4), 80) for number in range(MAX_RUNNING + 3)]
        streams = [bench.front.submit(one) for one in asked]
        await anext(streams[0])
        await bench.front.freeze_all()
        made = [await queued_chunks(one) for one in streams]
        assert [one[-1].finish for one in made] == [Finish.FROZEN] * len(asked)
        await bench.until_idle()

    run(play)


def test_the_caps_say_whose_logprobs_they_are_and_that_resumption_is_not_exact(run: Run) -> None:
    async def play(bench: Bench) -> None:
        caps = bench.front.caps()
        assert caps.logprob_mode == {"vllm": "raw", "sglang": "processed"}[caps.engine]
        assert not caps.is_resume_exact
        assert caps.context_tokens == CONTEXT_TOKENS

    run(play)


def test_a_server_that_cuts_its_answers_gives_error_chunks_and_trouble(run: Run) -> None:
    async def play(bench: Bench) -> None:
        streams = [bench.front.submit(request(n, prompt_of(4), 80)) for n in range(MAX_RUNNING)]
        for stream in streams:
            await anext(stream)
        await bench.engine.freeze_all()
        ends = [(await all_chunks(stream))[-1] for stream in streams]
        assert {end.finish for end in ends} == {Finish.ERROR}
        assert all(end.reason for end in ends)
        assert bench.front.troubled.is_set()
        assert await bench.front.is_alive()
        assert not bench.front.troubled.is_set()

    run(play)


def test_an_error_in_mid_stream_is_an_error_chunk_with_the_servers_words(run: Run) -> None:
    async def play(bench: Bench) -> None:
        await bench.engine.pause()
        await bench.engine.begin_update(1)
        made = await collect(bench.front.submit(request(1, prompt_of(4), 8)))
        assert made.finish is Finish.ERROR
        assert "unroutable" in made.reason

    run(play)


def test_leaving_the_engine_cancels_what_runs_and_the_server_hears_of_it(run: Run) -> None:
    async def play(bench: Bench) -> None:
        await bench.engine.pause()
        front = bench.front
        async with HttpEngine(front.origin, front.wire, front._facts) as other:
            stream = other.submit(request(1, prompt_of(4), 8))
            while not bench.engine.stats().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [chunk.finish for chunk in await all_chunks(stream)] == [Finish.CANCELLED]
        await bench.until_idle()

    run(play)


def _vllm_event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


_ONE_LOGPROB = {"content": [{"token_id": 5, "logprob": -0.5}]}
_ONE = _vllm_event(token_ids=[5], logprobs=_ONE_LOGPROB)
ODD_ANSWERS = {
    "no JSON": (200, _ONE + b"data: {oops\n\n", "cannot be read"),
    "text only": (200, _vllm_event(text="hi"), "only text"),
    "no logprobs": (200, _vllm_event(token_ids=[5]), "1 ids came with 0 logprobs"),
    "a cut": (200, _ONE, "without saying how"),
    "an unknown end": (200, _vllm_event(token_ids=[], finish_reason="abort"), "ended it: abort"),
    "an error event": (200, b'data: {"error": {"message": "no room"}}\n\n', "no room"),
    "a refusal": (401, b"who are you", "HTTP 401: who are you"),
    "a failure": (503, b"busy", "HTTP 503: busy"),
    "infinite": (200, _ONE.replace(b"-0.5", b"-1e999"), "cannot be read"),
}


@pytest.mark.parametrize("name", list(ODD_ANSWERS))
def test_an_answer_that_does_not_add_up_is_one_error_chunk_that_says_why(name: str) -> None:
    status, body, reason = ODD_ANSWERS[name]

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await Response(body, status)(scope, receive, send)

    async def main() -> None:
        facts = ServerFacts(context_tokens=64, logprob_mode="raw")
        async with asyncio.timeout(30), served(answer) as url:
            wire = VllmGenerate("m")
            async with HttpEngine(parse_origin(url), wire, facts) as engine:
                chunks = await all_chunks(engine.submit(request(1, [1, 2], 8)))
        assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.ERROR]
        assert reason in chunks[-1].reason
        assert chunks[-1].ids == []

    asyncio.run(main())


def test_a_server_that_falls_silent_is_cut_and_in_trouble() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": _ONE, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def main() -> None:
        facts = ServerFacts(context_tokens=64, logprob_mode="raw")
        async with asyncio.timeout(30), served(answer) as url:
            origin = parse_origin(url)
            async with HttpEngine(origin, VllmGenerate("m"), facts, silence_max_s=0.1) as engine:
                made = await collect(engine.submit(request(1, [1, 2], 8)))
                assert engine.troubled.is_set()
        assert (made.ids, made.finish) == ([5], Finish.ERROR)
        assert "nothing came in 0.1 s" in made.reason

    asyncio.run(main())


def _open(wires: frozenset[str], **asked: Any) -> Any:
    async def main() -> Any:
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        engine = ScriptedSubject().make(ComputeThread())
        server = TokenServer(engine=engine, wires=wires, tokenizer=tokenizer)
        async with asyncio.timeout(60), served(server.app()) as url:
            return await probe_engine(parse_origin(url), **asked)

    return asyncio.run(main())


def test_a_server_that_gives_only_text_is_refused_with_the_reason_of_each_path() -> None:
    with pytest.raises(ConfigError, match=r"no token ids.*/generate: HTTP 404"):
        _open(frozenset(["/v1/chat/completions"]))


def test_only_the_wires_of_the_wanted_kind_are_tried() -> None:
    with pytest.raises(ConfigError, match="no token ids"):
        _open(frozenset(["/generate"]), kind=EngineKind.VLLM)


def test_the_best_wire_of_a_server_is_taken_and_a_smaller_context_counts() -> None:
    wire, facts = _open(ALL_WIRES, context_tokens=50)
    assert wire.path == "/inference/v1/generate"
    assert facts.context_tokens == 50


def test_a_server_that_is_not_there_is_said_to_be_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BoundaryError, match="cannot be reached"):
            asyncio.run(probe_engine(parse_origin(url)))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, (0.7, 0.9, 5, 0.1)),
        ({"top_p": 0.0, "top_k": 0, "min_p": 0.1}, (0.0, 1.0, -1, 0.0)),
        ({"temperature": 1e-40, "top_k": 10**18}, (0.0, 1.0, 2**30, 0.0)),
    ],
)
def test_sampling_numbers_that_servers_refuse_are_told_as_what_they_mean(
    sent: dict[str, Any], told: tuple[float, float, int, float]
) -> None:
    numbers = sampling_numbers(request(1, [1], 1, **sent))
    assert tuple(numbers[name] for name in ("temperature", "top_p", "top_k", "min_p")) == told


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://h:1", "http://", "http://h:99999", "http://u:p@h:1", "http://h?q"],
)
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_origin(url)


def test_an_address_may_end_in_v1_and_may_have_a_prefix() -> None:
    assert str(parse_origin("http://h:8000/v1/")) == "http://h:8000"
    assert str(parse_origin("https://h/engine/v1")) == "https://h:443/engine"
    assert str(parse_origin("http://[::1]:8000")) == "http://[::1]:8000"
