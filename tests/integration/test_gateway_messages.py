"""Anthropic Messages through the official SDK over real HTTP, against a scripted engine."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from gateway_rig import CutEngine, Rig, open_rig, scripted

from opengyre.engines.scripted import ScriptedEngine
from opengyre.seams.engine import Finish

Block = dict[str, Any]
Turn = Any
HELLO: list[Turn] = [{"role": "user", "content": "say hello"}]
PROPERTIES = {"command": {"type": "string"}, "timeout": {"type": "number"}}
BASH: Any = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": PROPERTIES},
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
ROOM: dict[str, Any] = {"context_tokens": 100_000}
ODD_ARGUMENTS = [
    '{"command": "ls"}',
    '{"timeout": 5000.0, "command": "ls"}',
    '{ "command" :  "echo  \\u00e9\\ud83d\\ude00 " }',
    '{"command":"a\\tb", "timeout": 1.50}',
    '{"command": "x", "flag": true, "deep": {"b": [1.0, null], "a": ""}}',
    '{"command": "not closed}',
    '["ls"]',
    "{}",
]


@asynccontextmanager
async def client_of(rig: Rig, key: str = "key-1") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"{rig.gateway.address}/e000001", api_key=key, max_retries=0
    ) as client:
        yield client


def odd_answer(text: str, seed: int) -> str:
    """Depends on the text alone, so that a continued answer is the same."""
    dice = random.Random(text)
    thinking = dice.choice(["", "<think>\nfirst ls\n\n</think>\n\n", "<think>\n\n</think>\n\n"])
    words = dice.choice(["", "Let me look.  \n", "ünïcode 😀\n\n"])
    return (
        thinking
        + words
        + "\n".join(called(dice.choice(ODD_ARGUMENTS)) for _ in range(dice.choice([1, 1, 2])))
    )


def first_text(message: Any) -> str:
    """Of an answer that begins with text, as many programs read it."""
    return str(message.content[0].text)


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def as_harness(raw: str) -> Any:
    """Arguments as Claude Code sends them back: in schema key order, no JSON wrapped."""
    try:
        value = json.loads(raw or "{}", parse_float=whole_or_float, parse_constant=no_number)
    except ValueError:
        return {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    if not isinstance(value, dict):
        return value
    known = [key for key in PROPERTIES if key in value]
    return {key: value[key] for key in [*known, *(key for key in value if key not in known)]}


def whole_or_float(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def no_number(text: str) -> float:
    raise ValueError(text)


class Folded:
    """A stream's events as a harness folds them; the grammar is checked on the way."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_deltas = 0
        self.kinds: list[str] = []
        self.start: Any = None
        self.end: Any = None
        self._open: int | None = None

    def add(self, event: RawMessageStreamEvent) -> None:
        self.kinds.append(event.type)
        match event.type:
            case "message_start":
                assert self.kinds == ["message_start"]
                self.start = event.message
            case "content_block_start":
                assert (event.index, self._open) == (len(self.blocks), None)
                self._open = event.index
                self.blocks.append({**event.content_block.model_dump(exclude_none=True)})
                if event.content_block.type == "tool_use":
                    self.blocks[-1]["input"] = ""
            case "content_block_delta":
                assert event.index == self._open
                self._extend(event.delta.model_dump())
            case "content_block_stop":
                assert event.index == self._open
                self._open = None
            case "message_delta":
                assert self._open is None
                self.end = event
            case "message_stop":
                assert self.end is not None

    def sent_back(self) -> list[Block]:
        """The blocks as a harness has them in its next request."""
        return [
            {**block, "input": as_harness(block["input"])} if "input" in block else block
            for block in self.blocks
        ]

    def _extend(self, delta: dict[str, Any]) -> None:
        self.num_deltas += 1
        name, field = {
            "text_delta": ("text", "text"),
            "thinking_delta": ("thinking", "thinking"),
            "signature_delta": ("signature", "signature"),
            "input_json_delta": ("input", "partial_json"),
        }[delta["type"]]
        self.blocks[-1][name] += delta[field]


async def streamed(client: anthropic.AsyncAnthropic, **body: Any) -> Folded:
    folded = Folded()
    stream = await client.messages.create(
        model="m", stream=True, **{"max_tokens": 4096, "messages": HELLO, **body}
    )
    async for event in stream:
        folded.add(event)
    assert folded.kinds[-2:] == ["message_delta", "message_stop"]
    return folded


async def turn(client: anthropic.AsyncAnthropic, *, is_stream: bool, **body: Any) -> list[Block]:
    """The blocks of one answer, as a harness sends them back."""
    if is_stream:
        return (await streamed(client, **body)).sent_back()
    whole = await client.messages.create(model="m", **{"max_tokens": 4096, **body})
    return [block.model_dump(exclude_none=True) for block in whole.content]


def results(blocks: list[Block]) -> list[Block]:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": f"result of {k}"}
        for k, call in enumerate(calls)
    ]


def prefixes_hold(rig: Rig, num_turns: int) -> None:
    """Every prompt begins with all that was before: one unbroken branch."""
    assert len(rig.recorder.records) == num_turns
    before: list[int] = []
    for k, record in enumerate(rig.recorder.records):
        prompt = rig.prompt_of(record)
        assert prompt[: len(before)] == before, f"turn {k + 1}"
        assert (record.header.fork_reason, record.header.num_kept_tokens) == ("", len(before))
        assert (record.header.protocol, len(record.logprobs)) == (
            "anthropic",
            len(record.completion_ids),
        )
        before = prompt + record.completion_ids


# ---- one call


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


# ---- many turns


@pytest.mark.parametrize("is_stream", [True, False])
def test_case_01_recorded_ids_are_what_the_engine_received_and_returned(is_stream: bool) -> None:
    async def main() -> None:
        inner: ScriptedEngine = scripted(odd_answer, **ROOM)
        engine: Any = CutEngine(inner, num_tokens=10**6, finish=Finish.FROZEN, num_cuts=0)
        async with (
            open_rig({"s0": engine}, max_context_tokens=100_000) as rig,
            client_of(rig) as client,
        ):
            messages = list(HELLO)
            for _ in range(3):
                blocks = await turn(
                    client, is_stream=is_stream, messages=messages, tools=[BASH], thinking=THINKING
                )
                messages += [
                    {"role": "assistant", "content": blocks},
                    {"role": "user", "content": results(blocks)},
                ]
            await rig.gateway.close_session("e000001")
            for request, record in zip(engine.requests, rig.recorder.records, strict=True):
                assert rig.prompt_of(record) == request.prompt_ids
                assert record.completion_ids
            prefixes_hold(rig, 3)

    asyncio.run(main())


def as_sent(blocks: list[Block]) -> list[Block]:
    return blocks


def without_thinking(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block["type"] != "thinking"]


def trimmed_and_moved(blocks: list[Block]) -> list[Block]:
    """Thinking trimmed, texts before calls, and a cache mark on the last block."""
    found = [
        {**block, "thinking": block["thinking"].strip()} if block["type"] == "thinking" else block
        for block in blocks
    ]
    found.sort(key=lambda block: block["type"] == "tool_use")
    return [*found[:-1], {**found[-1], "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize(
    ("is_stream", "rewrite", "display"),
    [
        (True, as_sent, "summarized"),
        (False, as_sent, "omitted"),
        (False, without_thinking, "summarized"),
        (True, trimmed_and_moved, "omitted"),
        (True, trimmed_and_moved, "summarized"),
    ],
)
def test_case_02_over_20_turns_every_prompt_begins_with_all_that_was_before(
    is_stream: bool, rewrite: Callable[[list[Block]], list[Block]], display: str
) -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(odd_answer, **ROOM)}, max_context_tokens=100_000) as rig,
            client_of(rig) as client,
        ):
            messages = list(HELLO)
            for _ in range(20):
                blocks = await turn(
                    client,
                    is_stream=is_stream,
                    messages=messages,
                    tools=[BASH],
                    thinking={**THINKING, "display": display},
                )
                messages += [
                    {"role": "assistant", "content": rewrite(blocks)},
                    {"role": "user", "content": results(blocks)},
                ]
            await rig.gateway.close_session("e000001")
        prefixes_hold(rig, 20)

    asyncio.run(main())


async def one_call(client: anthropic.AsyncAnthropic) -> Block:
    (block,) = await turn(client, is_stream=True, messages=HELLO, tools=[BASH])
    return block


async def answer_call(client: anthropic.AsyncAnthropic, block: Block) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": results([block])},
    ]
    await streamed(client, messages=messages, tools=[BASH])


def test_case_03_arguments_of_another_meaning_fork_with_a_reason_and_keep_both_turns() -> None:
    async def main() -> None:
        answer = called('{"command": "ls", "timeout": 5000.0}')
        async with open_rig({"s0": scripted(lambda text, seed: answer)}) as rig:
            async with client_of(rig) as client:
                block = await one_call(client)
                await answer_call(client, {**block, "input": {"command": "pwd", "timeout": 5000}})
                await answer_call(client, {**block, "input": {"timeout": 5000, "command": "ls"}})
            await rig.gateway.close_session("e000001")
            one, two, three = rig.told
            assert (one.fork_reason, three.fork_reason) == ("", "")
            assert "not ours" in two.fork_reason
            assert three.parent == one.turn
            assert three.num_kept_tokens == one.num_new_prompt_tokens + one.num_completion_tokens
            assert two.num_kept_tokens < three.num_kept_tokens

    asyncio.run(main())


@pytest.mark.parametrize(
    "raw", ['{"command": "not closed', "echo hi", '["ls"]', '{"command": NaN}']
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_case_03_malformed_arguments_attach_by_their_raw_text(raw: str, is_stream: bool) -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: called(raw))}) as rig:
            async with client_of(rig) as client:
                (block,) = await turn(client, is_stream=is_stream, messages=HELLO, tools=[BASH])
                await answer_call(client, block)
            await rig.gateway.close_session("e000001")
            prefixes_hold(rig, 2)

    asyncio.run(main())


def test_case_04_parallel_results_attach_in_the_harnesses_order() -> None:
    async def main() -> None:
        answer = "\n".join(called(f'{{"command": "{name}"}}') for name in "abc")
        async with open_rig({"s0": scripted(lambda text, seed: answer)}) as rig:
            async with client_of(rig) as client:
                blocks = await turn(client, is_stream=True, messages=HELLO, tools=[BASH])
                said = [*HELLO, {"role": "assistant", "content": blocks}]
                for order in ([0, 1, 2], [2, 0, 1]):
                    told = [results(blocks)[k] for k in order]
                    messages = [*said, {"role": "user", "content": told}]
                    await streamed(client, messages=messages, tools=[BASH])
            await rig.gateway.close_session("e000001")
            first, straight, turned = rig.told
            assert (straight.parent, turned.parent) == (first.turn, first.turn)
            assert (straight.fork_reason, turned.fork_reason) == ("", "")
            prompts = [rig.prompt_of(record) for record in rig.recorder.records]
            assert prompts[1] != prompts[2]
            assert sorted(prompts[1]) == sorted(prompts[2])

    asyncio.run(main())


def as_blocks(messages: Iterable[Turn]) -> list[Turn]:
    """Strings as one block; the newest block is marked for the cache."""
    told: list[Turn] = []
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        told.append({**message, "content": [dict(block) for block in blocks]})
    told[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return told


def test_case_05_cache_marks_and_ways_of_writing_content_cause_no_fork() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(odd_answer, **ROOM)}, max_context_tokens=100_000) as rig,
            client_of(rig) as client,
        ):
            messages = [*HELLO, {"role": "system", "content": "Skills: none."}]
            for k in range(8):
                system: Any = "You act." if k % 2 else [{"type": "text", "text": "You act."}]
                blocks = await turn(
                    client,
                    is_stream=bool(k % 3),
                    messages=as_blocks(messages) if k % 2 else messages,
                    tools=[{**BASH, "cache_control": {"type": "ephemeral"}} if k % 2 else BASH],
                    thinking=THINKING,
                    system=system,
                )
                told = [{**result, "is_error": False} for result in results(blocks)]
                if k % 2:
                    told = results(blocks)
                messages += [
                    {"role": "assistant", "content": blocks},
                    {"role": "user", "content": told},
                ]
            await rig.gateway.close_session("e000001")
        prefixes_hold(rig, 8)

    asyncio.run(main())
