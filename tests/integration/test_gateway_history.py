"""Histories over real HTTP: exact prefixes, rewritten turns, retries, branches."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
from gateway_rig import TOOLS, Rig, open_rig, scripted

from opengyre.gateway.delta import restore_body
from opengyre.trajectory.turns import ForkReason

Message = dict[str, Any]
ODD_ARGUMENTS = [
    '{"command": "ls"}',
    '{"timeout": 5000.0, "command": "ls"}',
    '{ "command" :  "echo  \\u00e9\\ud83d\\ude00" }',
    '{"command":"a\\tb", "n": 1.50}',
    '{"command": "x", "flag": true, "deep": {"b": [1.0, null], "a": ""}}',
    '{"command": "not closed}',
]


def odd_answer(text: str, seed: int) -> str:
    """Depends on the text alone, so that a continued answer is the same."""
    dice = random.Random(text)
    thinking = dice.choice(["", "<think>\nfirst ls\n\n</think>\n\n", "<think>\n\n</think>\n\n"])
    words = dice.choice(["", "Let me look.  \n", "ünïcode 😀\n\n"])
    calls = [
        f'<tool_call>\n{{"name": "bash", "arguments": {dice.choice(ODD_ARGUMENTS)}}}\n</tool_call>'
        for _ in range(dice.choice([1, 1, 2]))
    ]
    return thinking + words + "\n".join(calls)


async def chat(rig: Rig, messages: list[Message], **more: Any) -> Message:
    """The assistant message of one call, as a plain JSON object."""
    body = {"model": "m", "messages": messages, "tools": TOOLS, **more}
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{rig.gateway.address}/e000001/v1/chat/completions",
            headers={"authorization": "Bearer key-1"},
            content=json.dumps(body),
        )
    assert answer.status_code == 200, answer.text
    message: Message = answer.json()["choices"][0]["message"]
    return message


def results(message: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result of {k}"}
        for k, call in enumerate(message["tool_calls"])
    ]


def as_sent(message: Message) -> Message:
    return message


def without_reasoning(message: Message) -> Message:
    return {key: message.get(key) for key in ("role", "content", "tool_calls")}


def rewritten_in_form(message: Message) -> Message:
    """As harnesses do: keys sorted, compact, 5000.0 to 5000, content and reasoning trimmed."""
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        try:
            value = json.loads(
                arguments, parse_float=lambda t: float(t) if float(t) % 1 else int(float(t))
            )
            arguments = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        except ValueError:
            pass
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    trimmed = (message.get("reasoning_content") or "").strip()
    return {
        "role": "assistant",
        "content": message.get("content") or "",
        "tool_calls": calls,
        "reasoning_content": trimmed,
    }


def play(rewrite: Callable[[Message], Message]) -> None:
    async def main() -> None:
        engine = scripted(odd_answer, context_tokens=100_000)
        async with open_rig({"s0": engine}, max_context_tokens=100_000) as rig:
            messages: list[Message] = [
                {"role": "system", "content": "You act."},
                {"role": "user", "content": "Do it."},
            ]
            for _ in range(20):
                message = await chat(rig, messages)
                messages += [rewrite(message), *results(message)]
            await rig.gateway.close_session("e000001")
        records = rig.recorder.records
        assert len(records) == 20
        before: list[int] = []
        for k, record in enumerate(records):
            prompt = rig.prompt_of(record)
            assert prompt[: len(before)] == before, f"turn {k + 1}"
            assert record.header.num_kept_tokens == len(before)
            assert record.header.fork_reason == ""
            before = prompt + record.completion_ids

    asyncio.run(main())


def test_over_20_turns_every_prompt_begins_with_all_that_was_before() -> None:
    play(as_sent)


def test_dropped_reasoning_keeps_the_branch() -> None:
    play(without_reasoning)


def test_arguments_written_otherwise_keep_the_branch() -> None:
    play(rewritten_in_form)


def test_arguments_of_another_meaning_fork_with_a_reason_and_keep_both_turns() -> None:
    async def main() -> None:
        answer = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
        async with open_rig({"s0": scripted(lambda text, seed: answer)}) as rig:
            first: list[Message] = [{"role": "user", "content": "Do it."}]
            message = await chat(rig, first)
            changed = json.loads(json.dumps(message))
            changed["tool_calls"][0]["function"]["arguments"] = '{"command": "pwd"}'
            await chat(rig, [*first, changed, *results(changed)])
            await chat(rig, [*first, message, *results(message)])
            await rig.gateway.close_session("e000001")
            one, two, three = rig.told
            assert (one.fork_reason, three.fork_reason) == ("", "")
            assert two.fork_reason == ForkReason.REWRITTEN_TURN
            assert three.parent == one.turn
            assert 0 < two.num_kept_tokens < one.num_new_prompt_tokens + one.num_completion_tokens

    asyncio.run(main())


async def leave_at_first_text(url: str, headers: dict[str, str], body: str) -> None:
    """A client that goes away once the first words are there."""
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", url, headers=headers, content=body) as response,
    ):
        async for line in response.aiter_lines():
            if '"content":"w' in line:
                return


def test_a_retry_is_a_later_attempt_of_the_same_turn_whatever_the_order_of_its_keys() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "word " * 100, tokens_per_s=400)
        async with open_rig({"s0": engine}) as rig:
            url = f"{rig.gateway.address}/e000001/v1/chat/completions"
            headers = {"authorization": "Bearer key-1"}
            first = '{"messages": [{"role": "user", "content": "go"}], "stream": true}'
            again = '{"stream":true, "messages": [{"content": "go", "role": "user"}]}'
            await leave_at_first_text(url, headers, first)
            async with httpx.AsyncClient() as client:
                answer = await client.post(url, headers=headers, content=again)
            assert answer.text.endswith("data: [DONE]\n\n")
            await rig.gateway.close_session("e000001")
            ends = [(t.turn, t.attempt, t.finish, t.is_committed) for t in rig.told]
            assert ends == [
                ("e000001.t1", 0, "cancelled", False),
                ("e000001.t1", 1, "stop", True),
            ]
            cut, whole = rig.recorder.records
            assert whole.completion_ids[: len(cut.completion_ids)] == cut.completion_ids

    asyncio.run(main())


def test_two_honest_identical_requests_are_two_turns() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: f"seed {seed}")}) as rig:
            messages: list[Message] = [{"role": "user", "content": "go"}]
            one, two = await asyncio.gather(chat(rig, messages), chat(rig, messages))
            assert one["content"] != two["content"]
            await rig.gateway.close_session("e000001")
            assert sorted(turn.turn for turn in rig.told) == ["e000001.t1", "e000001.t2"]
            assert all(turn.attempt == 0 and turn.is_committed for turn in rig.told)

    asyncio.run(main())


def test_concurrent_branches_do_not_disturb_each_other() -> None:
    async def main() -> None:
        async with open_rig(
            {"s0": scripted(odd_answer, context_tokens=100_000)}, max_context_tokens=100_000
        ) as rig:

            async def branch(name: str) -> None:
                messages: list[Message] = [{"role": "system", "content": name}]
                messages.append({"role": "user", "content": "Do it."})
                for _ in range(5):
                    message = await chat(rig, messages)
                    messages += [message, *results(message)]

            await asyncio.gather(branch("main"), branch("helper one"), branch("helper two"))
            await rig.gateway.close_session("e000001")
            roots = [turn for turn in rig.told if turn.fork_reason or not turn.parent]
            assert len(rig.told) == 15
            assert len(roots) == 3

    asyncio.run(main())


def test_raw_bodies_restore_byte_for_byte_from_deltas_proportional_to_what_is_new() -> None:
    async def main() -> None:
        async with open_rig(
            {"s0": scripted(odd_answer, context_tokens=100_000)}, max_context_tokens=100_000
        ) as rig:
            messages: list[Message] = [{"role": "user", "content": "x" * 20_000}]
            sent = []
            for k in range(6):
                body = {"model": "m", "messages": messages, "tools": TOOLS, "seed": k}
                sent.append(json.dumps(body).encode())
                message = await chat(rig, messages, seed=k)
                messages = [*messages, message, *results(message)]
            await rig.gateway.close_session("e000001")
            bodies: dict[str, bytes] = {"": b""}
            for record, body in zip(rig.recorder.records, sent, strict=True):
                restored = restore_body(record.request_delta, bodies[record.header.parent])
                assert restored == body
                bodies[record.header.turn] = restored
            assert max(len(r.request_delta) for r in rig.recorder.records[1:]) < 1500

    asyncio.run(main())
