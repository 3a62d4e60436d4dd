"""Anthropic Messages through the official SDK over real HTTP, against a scripted engine."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from gateway_rig import CutEngine, PlainTokenizer, open_rig, scripted
from messages_rig import (
    BASH,
    HELLO,
    ROOM,
    THINKING,
    called,
    client_of,
    first_text,
    odd_answer,
    prefixes_hold,
    results,
    streamed,
    turn,
)

from opengyre.engines.scripted import ScriptedEngine


def test_an_unstreamed_message_has_the_text_and_the_exact_record() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hello there")}) as rig:
            async with client_of(rig) as client:
                told = await client.messages.create(model="m", max_tokens=99, messages=HELLO)
            await rig.gateway.close_session("e000001")
            assert first_text(told) == "hello there"
            assert (told.id, told.model, told.role) == ("msg_e000001_t1_a0", "m", "assistant")
            assert (told.stop_reason, told.stop_sequence) == ("end_turn", None)
            (record,) = rig.recorder.records
            assert told.usage.output_tokens == len(record.completion_ids)
            assert told.usage.input_tokens == len(record.new_prompt_ids)

    asyncio.run(main())


def test_a_stream_comes_in_increments_of_the_sdks_typed_events() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "one two three four")}) as rig,
            client_of(rig) as client,
        ):
            folded = await streamed(client)
            assert folded.blocks == [{"type": "text", "text": "one two three four"}]
            assert folded.num_deltas > 3
            assert folded.start.usage.input_tokens > 0
            assert folded.end.delta.stop_reason == "end_turn"
            assert folded.end.usage.output_tokens > 3
            async with client.messages.stream(model="m", max_tokens=99, messages=HELLO) as stream:
                assert (await anext(aiter(stream.text_stream))).startswith("one")
                final = await stream.get_final_message()
            assert final.usage.output_tokens == folded.end.usage.output_tokens

    asyncio.run(main())


def test_thinking_text_and_calls_are_blocks_in_order_with_arguments_as_sampled() -> None:
    arguments = '{"command":  "echo \\u00e9", "timeout": 5000.0}'
    answer = f"<think>\nhm\n</think>\n\nLook:\n{called(arguments)}\n{called('{}')}"

    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: answer)}) as rig,
            client_of(rig) as client,
        ):
            folded = await streamed(client, tools=[BASH], thinking=THINKING)
            thinking, text, one, two = folded.blocks
            assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "hm")
            assert thinking["signature"]
            assert text == {"type": "text", "text": "Look:"}
            assert (one["name"], one["input"], two["input"]) == ("bash", arguments, "{}")
            assert one["id"] != two["id"]
            assert folded.end.delta.stop_reason == "tool_use"
            whole = await client.messages.create(
                model="m", max_tokens=999, messages=HELLO, tools=[BASH], thinking=THINKING
            )
            assert [block.type for block in whole.content] == [b["type"] for b in folded.blocks]
            assert whole.content[2].to_dict()["input"] == json.loads(arguments)

    asyncio.run(main())


def test_a_client_that_did_not_ask_for_thinking_gets_text_first() -> None:
    async def main() -> None:
        answer = "<think>\nhm\n</think>\n\nhello"
        async with (
            open_rig({"s0": scripted(lambda text, seed: answer)}) as rig,
            client_of(rig) as client,
        ):
            folded = await streamed(client)
            assert folded.blocks == [{"type": "text", "text": "hello"}]
            whole = await client.messages.create(model="m", max_tokens=99, messages=HELLO)
            assert first_text(whole) == "hello"

    asyncio.run(main())


def test_limits_stop_sequences_and_choices_are_honoured() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "one two STOP three")}) as rig,
            client_of(rig) as client,
        ):
            folded = await streamed(client, stop_sequences=["STOP"])
            assert folded.blocks[0]["text"].strip() == "one two"
            assert folded.end.delta.stop_reason == "stop_sequence"
            assert folded.end.delta.stop_sequence == "STOP"
            whole = await client.messages.create(model="m", max_tokens=2, messages=HELLO)
            assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 2)

    asyncio.run(main())


def test_parallel_calls_can_be_switched_off() -> None:
    async def main() -> None:
        answer = f"{called('{}')}\n{called('{}')}"
        async with (
            open_rig({"s0": scripted(lambda text, seed: answer)}) as rig,
            client_of(rig) as client,
        ):
            choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
            folded = await streamed(client, tools=[BASH], tool_choice=choice)
            assert [block["type"] for block in folded.blocks] == ["tool_use"]
            assert folded.end.delta.stop_reason == "tool_use"

    asyncio.run(main())


def begun_or_no(prompt_ids: list[int], seed: int) -> list[int]:
    """The rest of a call that the prompt has begun; without one, no call."""
    tokenizer = PlainTokenizer()
    begun = tokenizer.decode(prompt_ids).rpartition("<|im_start|>assistant\n")[2]
    whole = called('{"command": "ls"}') if begun else "no"
    assert whole.startswith(begun)
    return tokenizer.encode(whole[len(begun) :] + "<|im_end|>")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "bash"}])
def test_a_call_that_is_asked_for_is_what_comes(choice: Any) -> None:
    async def main() -> None:
        async with open_rig({"s0": ScriptedEngine(begun_or_no)}) as rig, client_of(rig) as client:
            body = {"messages": HELLO, "tools": [BASH], "tool_choice": choice}
            counted = await client.messages.count_tokens(model="m", **body)
            assert counted.input_tokens == (await streamed(client, **body)).start.usage.input_tokens
            for is_stream in (True, False):
                (block,) = await turn(client, is_stream=is_stream, **body)
                assert (block["name"], block["input"]) == ("bash", {"command": "ls"})
            (block,) = await turn(client, is_stream=True, messages=HELLO, tools=[BASH])
            assert block == {"type": "text", "text": "no"}

    asyncio.run(main())


def test_comments_while_nothing_comes_do_not_disturb_the_stream() -> None:
    async def main() -> None:
        async with (
            open_rig(
                {"s0": scripted(lambda text, seed: "a b c", tokens_per_s=8)}, hold_comment_s=0.02
            ) as rig,
            client_of(rig) as client,
        ):
            folded = await streamed(client)
            assert folded.blocks == [{"type": "text", "text": "a b c"}]

    asyncio.run(main())


def test_an_answer_continued_after_every_few_tokens_is_the_same_stream() -> None:
    arguments = '{"command":  "echo \\u00e9 ünï", "timeout": 5000.0}'
    answer = f"<think>\nhm, let me\n</think>\n\nLook:\n{called(arguments)}\n{called('[1')}"

    async def main() -> None:
        told = []
        for num_tokens in (10**6, 1, 3):
            engine: Any = CutEngine(scripted(lambda text, seed: answer), num_tokens=num_tokens)
            async with open_rig({"s0": engine}) as rig:
                async with client_of(rig) as client:
                    folded = await streamed(client, tools=[BASH], thinking=THINKING)
                await rig.gateway.close_session("e000001")
                (record,) = rig.recorder.records
                told.append((folded.blocks, folded.end, record.completion_ids))
        assert told[1:] == told[:1] * 2
        assert [block["type"] for block in told[0][0]] == ["thinking", "text"] + ["tool_use"] * 2

    asyncio.run(main())


def test_a_client_that_is_not_shown_thinking_hears_comments_meanwhile() -> None:
    async def main() -> None:
        answer = "<think>\n" + "hm " * 30 + "\n</think>\n\nhello"
        engine = scripted(lambda text, seed: answer, tokens_per_s=200)
        async with open_rig({"s0": engine}, hold_comment_s=0.05) as rig:
            body = {"model": "m", "messages": HELLO, "max_tokens": 999, "stream": True}
            async with (
                httpx.AsyncClient() as client,
                client.stream(
                    "POST",
                    f"{rig.gateway.address}/e000001/v1/messages",
                    headers={"x-api-key": "key-1"},
                    json=body,
                ) as response,
            ):
                lines = [line async for line in response.aiter_lines()]
        num_before = next(k for k, line in enumerate(lines) if "text_delta" in line)
        assert ": held" in lines[:num_before]
        assert "thinking" not in "".join(lines)

    asyncio.run(main())


# ---- what else is served


def test_case_13_count_tokens_is_the_prompts_length_also_after_some_turns() -> None:
    async def main() -> None:
        engine = scripted(odd_answer, **ROOM)
        async with (
            open_rig({"s0": engine}, max_context_tokens=100_000) as rig,
            client_of(rig) as client,
        ):
            messages = list(HELLO)
            body: dict[str, Any] = {"system": "You act.", "tools": [BASH], "thinking": THINKING}
            for k in range(4):
                counted = await client.messages.count_tokens(model="m", messages=messages, **body)
                folded = await streamed(client, messages=messages, **body)
                assert counted.input_tokens == folded.start.usage.input_tokens
                assert counted.input_tokens == folded.end.usage.input_tokens
                record = rig.recorder.records[k]
                assert counted.input_tokens == len(rig.prompt_of(record))
                blocks = folded.sent_back()
                messages += [
                    {"role": "assistant", "content": blocks},
                    {"role": "user", "content": results(blocks)},
                ]
            await rig.gateway.close_session("e000001")
            prefixes_hold(rig, 4)

    asyncio.run(main())


def test_case_13_models_beta_paths_and_probes_are_served() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "hi")}, model="policy") as rig,
            client_of(rig) as client,
        ):
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).display_name == "policy"
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("other")
            told = await client.beta.messages.create(
                model="m", max_tokens=9, messages=HELLO, betas=["no-such-beta"]
            )
            assert first_text(told) == "hi"
            prefixed = f"{rig.gateway.address}/e000001/any/prefix"
            async with anthropic.AsyncAnthropic(base_url=prefixed, api_key="key-1") as other:
                assert (await other.messages.create(model="m", max_tokens=9, messages=HELLO)).id
            async with httpx.AsyncClient() as plain:
                probe = await plain.head(f"{rig.gateway.address}/e000001/api/hello")
            assert probe.status_code in (200, 404)

    asyncio.run(main())


def test_refusals_are_the_sdks_own_errors() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            async with client_of(rig, key="wrong") as client:
                with pytest.raises(anthropic.AuthenticationError) as denied:
                    await client.messages.create(model="m", max_tokens=9, messages=HELLO)
            async with client_of(rig) as client:
                image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
                with pytest.raises(anthropic.BadRequestError, match="'image'"):
                    await streamed(client, messages=[{"role": "user", "content": [image]}])
                long = [{"role": "user", "content": "word " * 9000}]
                with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as full:
                    await streamed(client, messages=long)
            for error, kind in ((denied, "authentication_error"), (full, "invalid_request_error")):
                body: Any = error.value.body
                assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert rig.told == []

    asyncio.run(main())


def test_no_engine_in_time_is_a_503_that_is_retried() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "hi")
        async with open_rig({"s0": engine}, hold_max_s=0.05) as rig, client_of(rig) as client:
            rig.gateway.close_door("s0")
            with pytest.raises(anthropic.APIStatusError) as error:
                await client.messages.create(model="m", max_tokens=9, messages=HELLO)
            assert error.value.status_code == 503
            assert int(error.value.response.headers["retry-after"]) > 0

    asyncio.run(main())
