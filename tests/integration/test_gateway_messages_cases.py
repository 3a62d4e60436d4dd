"""Many turns in Anthropic Messages: exact ids, one branch, and forks only for another meaning."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import pytest
from gateway_rig import CutEngine, open_rig, scripted
from messages_rig import (
    BASH,
    HELLO,
    ROOM,
    THINKING,
    Block,
    Turn,
    called,
    client_of,
    odd_answer,
    prefixes_hold,
    results,
    streamed,
    turn,
)

from opengyre.engines.scripted import ScriptedEngine
from opengyre.seams.engine import Finish
from opengyre.trajectory.turns import ForkReason


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
            assert two.fork_reason == ForkReason.REWRITTEN_TURN
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


@pytest.mark.parametrize(
    ("sampled", "is_filled"),
    [('{"command": "ls"}', True), ('{"command": "ls", "quiet": false}', False)],
)
def test_case_03_a_default_that_the_harness_fills_in_or_drops_attaches(
    sampled: str, is_filled: bool
) -> None:
    """Claude Code's Edit comes back with `replace_all: false`, its schema's default."""
    quiet = {"type": "boolean", "default": False}
    tool = {**BASH, "input_schema": {"type": "object", "properties": {"quiet": quiet}}}
    sent = {"quiet": False, "command": "ls"} if is_filled else {"command": "ls"}

    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: called(sampled))}) as rig:
            async with client_of(rig) as client:
                (block,) = await turn(client, is_stream=True, messages=HELLO, tools=[tool])
                messages = [
                    *HELLO,
                    {"role": "assistant", "content": [{**block, "input": sent}]},
                    {"role": "user", "content": results([block])},
                ]
                await streamed(client, messages=messages, tools=[tool])
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
