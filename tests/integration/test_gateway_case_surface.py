"""Cases 13 to 16: paths, counts, large bodies, grammar, increments, what a run leaves behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from cases_rig import (
    ANSWER,
    ARGUMENTS,
    EACH_PROTOCOL,
    EACH_WAY,
    SAID,
    THOUGHT,
    WORDS,
    Harness,
    by_turn,
    open_case,
    read_events,
    tool_calls_of,
    witness,
)
from cases_speakers import SPEAKERS, Json, Said, Speaker, ToolSpec, parsed
from gateway_rig import until

from opengyre.gateway.delta import restore_body
from opengyre.seams.engine import Finish
from opengyre.seams.records import TokenRecord

CHAT, RESPONSES, MESSAGES = SPEAKERS
PREFIXES = ["v1", "", "a/b/v1", "openai/v1", "proxy/anthropic", "v1/v1"]
COUNTERS = {"anthropic": "messages/count_tokens", "openai-responses": "responses/input_tokens"}
LARGE_BYTES = 30 * 10**6


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("prefix", PREFIXES)
def test_case_13_any_prefix_query_header_and_field_leads_to_the_same_answer(
    speaker: Speaker, stream: bool, prefix: str
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            odd = {"x-unknown": "1", "anthropic-beta": "new-2099", "accept-encoding": "zstd,br"}
            one = case.harness(speaker, prefix=prefix, extra_headers=odd)
            one.extra = {"a_field_of_2099": {"deep": [1, None]}, "metadata": {"user_id": "{}"}}
            assert (await one.ask(stream=stream)).said == SAID
            one.speaker = with_query(speaker)
            assert (await one.ask(stream=stream)).said == SAID

    asyncio.run(main())


def with_query(speaker: Speaker) -> Speaker:
    queried = type(speaker)()
    queried.operation = f"{speaker.operation}?beta=true&x=%20"
    return queried


def test_case_13_claudes_probe_finds_nothing_without_a_key_and_models_are_told() -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}, model="qwen-tiny") as case:
            one = case.harness(MESSAGES)
            await one.ask(stream=False)
            base = f"{case.rig.gateway.address}/e000001"
            assert (await one.client.head(f"{base}/api/hello")).status_code == 404
            claude = {"x-api-key": "key-1", "anthropic-version": "2023-06-01"}
            for path in ("/v1/models", "/v1/models/qwen-tiny", "/models"):
                plain = await one.client.get(base + path, headers=case.harness(CHAT).headers)
                assert plain.status_code == 200
                assert "qwen-tiny" in plain.text
                told = await one.client.get(base + path, headers=claude)
                assert "qwen-tiny" in told.text
                assert "display_name" in told.text
            unknown = await one.client.get(base + "/v1/models/other", headers=claude)
            assert unknown.status_code == 404
            assert one.speaker.error_kind(unknown.json()) == "not_found_error"

    asyncio.run(main())


@EACH_WAY
@pytest.mark.parametrize("speaker", [RESPONSES, MESSAGES], ids=lambda one: str(one.name))
def test_case_13_a_count_is_the_length_of_the_prompt_that_is_used_later(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            one.history.insert(0, Said(role="system", text="You act. é"))
            for _ in range(4):
                num_counted = await count(one)
                reply = await one.turn(stream=stream)
                assert reply.num_prompt_tokens == num_counted
                asked = case.engines["s0"].requests[-1]
                assert len(asked.prompt_ids) == num_counted
            await case.close()
            assert len(case.rig.told) == 4, "a count is no turn"
            assert {turn.fork_reason for turn in case.rig.told} == {""}

    asyncio.run(main())


async def count(one: Harness) -> int:
    url = one.url.replace(one.speaker.operation, COUNTERS[one.speaker.name])
    body = one.body(stream=False)
    for key in ("stream", "max_tokens", "store", "include"):
        body.pop(key, None)
    answer = await one.client.post(url, headers=one.headers, json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


@EACH_PROTOCOL
def test_case_13_the_raw_bodies_are_kept_to_the_byte(speaker: Speaker) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            for k in range(4):
                one.extra = {"metadata": {"turn": "x" * (k % 3)}, "odd": " \u2028 é"}
                await one.turn(stream=True)
            await case.close()
            bodies: dict[str, bytes] = {"": b""}
            for record, raw in zip(case.records(), one.raw_bodies, strict=True):
                bodies[record.header.turn] = restored(record, bodies)
                assert bodies[record.header.turn] == raw

    asyncio.run(main())


def restored(record: TokenRecord, bodies: dict[str, bytes]) -> bytes:
    return restore_body(record.request_delta, bodies[record.header.parent])


def large_tools(num_bytes: int) -> tuple[ToolSpec, ...]:
    """As many as Claude Code has, and as wordy."""
    words = "Reads a file from the local file system. " * (num_bytes // 24 // 41)
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": words}}}
    return tuple((f"tool_{k}", schema) for k in range(24))


@EACH_PROTOCOL
@EACH_WAY
def test_case_14_a_first_request_of_120_kb_and_24_tools_passes(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker, tools=large_tools(90_000))
            one.history.insert(
                0, Said(role="system", text="Follow the rules of the house. " * 1000)
            )
            assert (await one.turn(stream=stream)).said == SAID
            assert (await one.turn(stream=stream)).said == SAID
            assert len(one.raw_bodies[0]) > 115_000
            await case.close()
            first, second = case.rig.told
            assert (second.parent, second.fork_reason) == (first.turn, "")
            assert second.num_new_prompt_tokens < 100

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_14_a_body_of_30_mb_passes_and_others_are_served_meanwhile(speaker: Speaker) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker, extra={"padding": "x" * LARGE_BYTES})
            other = case.harness(speaker, **case.open("e000002", "s0"))
            large = asyncio.create_task(one.ask(stream=True))
            num_served = 0
            while not large.done():
                assert (await other.ask(stream=True)).said == SAID
                num_served += 1
            assert (await large).said == SAID
            assert num_served >= 2
            await case.close()
            assert restore_body(case.records()[0].request_delta, b"") == one.raw_bodies[0]

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_14_a_body_beyond_the_limit_is_refused_in_the_protocols_shape(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            await one.ask(stream=False)
            body = json.dumps(one.body(stream=True, padding="x" * 34 * 10**6)).encode()
            answer = await one.client.post(one.url, headers=one.headers, content=body)
            assert answer.status_code == 413
            assert speaker.error_kind(answer.json())

    asyncio.run(main())


SHAPES = {
    "only text": "Some words.",
    "only thinking": "<think>\nHm.\n</think>\n\n",
    "only a call": tool_calls_of(ARGUMENTS),
    "a call without arguments": tool_calls_of("{}"),
    "three calls": tool_calls_of(ARGUMENTS, "{}", '{"timeout": 5000.0}'),
    "thinking and a call": f"<think>\nHm.\n</think>\n\n{tool_calls_of(ARGUMENTS)}",
    "nothing": "",
    "blank": " \n\n",
    "an emoji in pieces": "\U0001f9d1\u200d\U0001f680 und 漢字",
    "what looks like an event": "data: [DONE]\n\nevent: message_stop\ndata: {}\n\n: x",
    "a thought that never ends": "<think>\nand so on",
    "a call that never ends": '<tool_call>\n{"name": "bash", "arguments": {"command": "x',
    "a call with no name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
}


@EACH_PROTOCOL
@pytest.mark.parametrize("shape", SHAPES)
def test_case_15_every_shape_of_answer_keeps_the_grammar_and_is_the_same_streamed_and_whole(
    speaker: Speaker, shape: str
) -> None:
    """The reader of the rig checks the grammar and the vendors' typed events."""

    async def main() -> None:
        async with open_case({"s0": witness(by_turn([SHAPES[shape], "Done."]))}) as case:
            streamed = await case.harness(speaker).ask(stream=True)
            whole = await case.harness(speaker).ask(stream=False)
            assert as_values(streamed.said) == as_values(whole.said)
            assert streamed.num_prompt_tokens == whole.num_prompt_tokens
            assert streamed.num_completion_tokens == whole.num_completion_tokens
            await case.close()
            for record, reply in zip(case.records(), (streamed, whole), strict=True):
                assert reply.num_completion_tokens == len(record.completion_ids)
                assert reply.num_prompt_tokens == len(case.full_prompt(record))

    asyncio.run(main())


def as_values(said: Any) -> Any:
    """Messages has calls as values when it is not streamed."""
    text, thinking, calls, ending = said
    values = [(name, parsed(told), "" if parsed(told) else told) for name, told in calls]
    return text, thinking, values, ending


@EACH_PROTOCOL
def test_case_15_increments_come_while_the_engine_still_works(speaker: Speaker) -> None:
    async def main() -> None:
        engine = witness(lambda text, seed: ANSWER, tokens_per_s=100)
        async with open_case({"s0": engine}) as case:
            one = case.harness(speaker)
            body = one.body(stream=True)
            arrived: list[int] = []
            async with one.client.stream("POST", one.url, headers=one.headers, json=body) as answer:
                text = b""
                async for part in answer.aiter_raw():
                    arrived.append(engine.num_given)
                    text += part
            assert speaker.streamed(read_events(text.decode())[0]).said == SAID
            assert len(set(arrived)) > 30, "the tokens came in lumps"
            assert arrived[0] < 10

    asyncio.run(main())


@EACH_PROTOCOL
@EACH_WAY
def test_case_15_limits_and_stop_strings_end_an_answer_as_its_protocol_says(
    speaker: Speaker, stream: bool
) -> None:
    limit = {
        "openai-chat": "max_completion_tokens",
        "openai-responses": "max_output_tokens",
        "anthropic": "max_tokens",
    }[speaker.name]
    stop: Json = {"stop_sequences" if speaker.name == "anthropic" else "stop": ["und"]}

    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            cut = await case.harness(speaker).ask(stream=stream, **{limit: 5})
            assert (cut.ending, cut.num_completion_tokens) == ("length", 5)
            stopped = await case.harness(speaker).ask(stream=stream, **stop)
            assert stopped.text == "Wörter"
            assert stopped.calls == ()
            assert stopped.ending in ("stop", "stop_sequence")
            await case.close()
            assert case.records()[0].header.num_completion_tokens == 5

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_15_what_the_engine_can_honour_reaches_it(speaker: Speaker) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            asked = case.engines["s0"].requests
            await one.ask(stream=True, temperature=0.25, top_p=0.5)
            assert (asked[-1].temperature, asked[-1].top_p) == (0.25, 0.5)
            if speaker.name != "anthropic":
                await one.ask(stream=True, seed=1)
                await one.ask(stream=True, seed=2)
            await one.ask(stream=True, top_k=3)
            assert asked[-1].top_k == 3
            if speaker.name != "anthropic":
                await one.ask(stream=True, min_p=0.25)
                assert asked[-1].min_p == 0.25
            assert len({request.seed for request in asked}) == len(asked)

    asyncio.run(main())


async def stream_chat(client: openai.AsyncOpenAI, body: Json) -> tuple[set[str], Any]:
    """Kinds of the events of the SDK's own helper, and what it made of them."""
    async with client.chat.completions.stream(**body) as stream:
        kinds = {event.type async for event in stream}
        return kinds, await stream.get_final_completion()


async def stream_response(client: openai.AsyncOpenAI, body: Json) -> Any:
    async with client.responses.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def stream_message(client: anthropic.AsyncAnthropic, body: Json) -> Any:
    async with client.messages.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_message()


def for_helpers(one: Harness) -> Json:
    """A body without `stream`, which the helpers set."""
    return {key: value for key, value in one.body(stream=True).items() if key != "stream"}


async def use_openai(client: openai.AsyncOpenAI, chat: Json, responses: Json) -> None:
    kinds, completion = await stream_chat(client, chat)
    message = completion.choices[0].message
    assert message.content == WORDS
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    assert completion.usage.completion_tokens > 40
    response = await stream_response(client, responses)
    assert response.output_text == WORDS
    assert response.output[-1].arguments == ARGUMENTS
    again = await client.responses.create(
        model="policy", input="Go on.", previous_response_id=response.id
    )
    assert again.output_text == WORDS


def test_case_15_openais_sdk_reads_chat_and_responses_with_its_own_helpers() -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            bodies = [for_helpers(case.harness(speaker)) for speaker in (CHAT, RESPONSES)]
            async with case.rig.client() as client:
                await use_openai(client, *bodies)

    asyncio.run(main())


async def use_anthropic(client: anthropic.AsyncAnthropic, body: Json) -> None:
    message = await stream_message(client, body)
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == (THOUGHT, WORDS)
    assert call.input == json.loads(ARGUMENTS)
    assert message.stop_reason == "tool_use"
    del body["max_tokens"]
    counted = await client.messages.count_tokens(**body)
    assert counted.input_tokens == message.usage.input_tokens
    models = await client.models.list()
    assert [model.id for model in models.data] == ["policy"]


def test_case_15_anthropics_sdk_accumulates_a_stream_with_its_own_helpers() -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            base = f"{case.rig.gateway.address}/e000001"
            body = for_helpers(case.harness(MESSAGES))
            async with anthropic.AsyncAnthropic(base_url=base, api_key="key-1") as client:
                await use_anthropic(client, body)

    asyncio.run(main())


FILES = {
    "a.txt": "first é\n",
    "sub/b.txt": "second 😀\n\n",
    "c.json": '{"k": [1, 2.50]}',
}
WRITES = [json.dumps({"path": path, "text": text}) for path, text in FILES.items()]
RUN = [
    f"<think>\nThe first one.\n</think>\n\n{tool_calls_of(WRITES[0])}",
    f"Two at once.\n\n{tool_calls_of(*WRITES[1:])}",
    "All done.",
]


async def act(one: Harness, workspace: Path, *, stream: bool) -> None:
    """An agent that writes what its model says, until it calls nothing."""
    for _ in range(len(RUN)):
        reply = await one.ask(stream=stream)
        results = []
        for call in reply.calls:
            told = json.loads(call.arguments)
            path = workspace / told["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(told["text"])
            results.append(f"wrote {len(told['text'])} letters")
        if not results:
            return
        one.keep(reply, one.speaker.as_harness(reply.sent_back), *results)
    raise AssertionError("it never ended")


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("fault", ["none", "moved", "died"])
def test_case_16_a_run_leaves_the_workspace_that_its_script_says(
    speaker: Speaker, stream: bool, fault: str, tmp_path: Path
) -> None:
    """The real programs are compared so in tests/harness."""
    how = {"none": {}, "moved": {"cut_at": 8}, "died": {"cut_at": 8, "how": Finish.ERROR}}[fault]

    async def main() -> None:
        async with open_case({"s0": witness(by_turn(RUN), **how)}) as case:
            one = case.harness(speaker)
            await act(one, tmp_path, stream=stream)
            assert one.num_requests == len(RUN)

    asyncio.run(main())
    found = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.*")}
    assert found == FILES


@EACH_WAY
@pytest.mark.parametrize("cut_at", [None, 1, 20, 50])
@pytest.mark.parametrize("speaker", [CHAT, RESPONSES], ids=lambda one: str(one.name))
def test_case_15_log_probabilities_are_those_of_the_record_also_over_a_move(
    speaker: Speaker, stream: bool, cut_at: int | None
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: WORDS, cut_at=cut_at)}) as case:
            one = case.harness(speaker)
            wish: Json = {"logprobs": True}
            if speaker is RESPONSES:
                wish = {"include": ["message.output_text.logprobs"]}
            body = one.body(stream=stream, **wish)
            answer = await one.client.post(one.url, headers=one.headers, json=body)
            told = told_logprobs(speaker, answer.text, stream=stream)
            await case.close()
            (record,) = case.records()
            assert [one["logprob"] for one in told] == record.logprobs[: len(told)]
            assert len(told) >= len(record.logprobs) - 1, "the end of the turn may be left out"
            text = b"".join(bytes(one["bytes"]) for one in told).decode()
            assert text.removesuffix("<|im_end|>") == WORDS

    asyncio.run(main())


def told_logprobs(speaker: Speaker, text: str, *, stream: bool) -> list[Json]:
    if not stream and speaker is CHAT:
        return list(json.loads(text)["choices"][0]["logprobs"]["content"])
    if not stream:
        return list(json.loads(text)["output"][0]["content"][0]["logprobs"])
    events = [data for _, data in read_events(text)[0] if data != "[DONE]"]
    if speaker is CHAT:
        choices = [event["choices"][0] for event in events if event["choices"]]
        return [one for c in choices if c["logprobs"] for one in c["logprobs"]["content"]]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    return [one for delta in deltas for one in delta["logprobs"]]


@EACH_PROTOCOL
def test_case_13_a_key_opens_its_execution_alone_and_nothing_after_its_end(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            other = case.harness(speaker, **case.open("e000002", "s0"))
            for each in (one, other):
                await each.ask(stream=False)
            other.key, key = one.key, other.key
            assert await refused_kind(other) == (401, "authentication_error")
            other.key = key
            await case.rig.gateway.close_session("e000002")
            assert await refused_kind(other) == (401, "authentication_error")
            assert (await one.ask(stream=True)).said == SAID

    asyncio.run(main())


async def refused_kind(one: Harness) -> tuple[int, str]:
    answer = await one.client.post(one.url, headers=one.headers, json=one.body(stream=True))
    return answer.status_code, one.speaker.error_kind(answer.json())


@EACH_PROTOCOL
@EACH_WAY
def test_case_13_bodies_in_chunks_and_clients_that_ask_before_they_send_are_served(
    speaker: Speaker, stream: bool
) -> None:
    """curl asks with `Expect: 100-continue`; some libraries know no length."""

    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            raw = json.dumps(one.body(stream=stream)).encode()

            async def in_chunks() -> AsyncIterator[bytes]:
                for at in range(0, len(raw), 50):
                    yield raw[at : at + 50]

            told = await one.client.post(one.url, headers=one.headers, content=in_chunks())
            assert told.status_code == 200
            reader, writer = await asyncio.open_connection(
                one.rig.gateway.host, one.rig.gateway.port
            )
            lines = [f"POST {one.url.removeprefix(one.rig.gateway.address)} HTTP/1.1", "host: x"]
            lines += [f"{name}: {value}" for name, value in one.headers.items()]
            lines += [f"content-length: {len(raw)}", "expect: 100-continue"]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            writer.write(raw)
            assert b"200" in await reader.readuntil(b" OK\r\n")
            writer.close()
            await until(lambda: len(case.rig.told) == 2)

    asyncio.run(main())
