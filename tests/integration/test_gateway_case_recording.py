"""Cases 1 and 2: what is recorded is exactly what engines received and returned."""

import asyncio
import random
from typing import Any

import pytest
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    EACH_WAY,
    SAID,
    by_turn,
    num_tokens_of,
    open_case,
    text_of,
    witness,
)
from cases_speakers import Said, Speaker

ODD_ARGUMENTS = [
    '{"timeout": 5000.0, "command": "ls"}',
    '{ "command" :  "echo  \\u00e9\\ud83d\\ude00" }',
    '{"command":"a\\tb \\/ c", "timeout": 1.50}',
    '{"deep": {"b": [1.0, null, true], "a": ""}, "command": "x   "}',
    '{"timeout": -0.0, "command": "\\u003cb\\u003e", "deep": {}}',
    '{"command": "1e3", "timeout": 1e3}',
    "{}",
]
MALFORMED = '{"command": "not closed}'
THOUGHTS = ["", "<think>\nfirst ls\n\n\n</think>\n\n", "<think>\n  blank before\n</think>\n\n"]
WORDS = ["", "Let me look.  \n\n", "ünïcode 😀 \n"]


def odd_answer(text: str, seed: int) -> str:
    """Of the text alone, so that a continued answer is the same."""
    dice = random.Random(text)
    calls = [
        f'<tool_call>\n{{"name": "bash", "arguments": {dice.choice(ODD_ARGUMENTS)}}}\n</tool_call>'
        for _ in range(dice.choice([1, 1, 2, 3]))
    ]
    return dice.choice(THOUGHTS) + dice.choice(WORDS) + "\n".join(calls)


@EACH_PROTOCOL
@EACH_WAY
def test_case_01_stored_ids_are_what_the_engine_received_and_returned(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            one = case.harness(speaker)
            reply = await one.turn(stream=stream)
            assert reply.said == SAID
            await one.turn(stream=stream)
            await case.close()
            first, second = case.records()
            for record, request in zip([first, second], case.engines["s0"].requests, strict=True):
                assert case.full_prompt(record) == request.prompt_ids
                assert len(record.logprobs) == len(record.completion_ids) == num_tokens_of(ANSWER)
                assert text_of(record.completion_ids) == ANSWER + "<|im_end|>"
                assert record.header.protocol == speaker.name
            assert reply.num_prompt_tokens == len(first.new_prompt_ids)
            assert reply.num_completion_tokens == len(first.completion_ids)

    asyncio.run(main())


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("as_sent", [True, False], ids=["verbatim", "as_its_program"])
def test_case_02_over_20_odd_turns_each_prompt_begins_with_all_before(
    speaker: Speaker, stream: bool, as_sent: bool
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(odd_answer)}) as case:
            one = case.harness(speaker)
            one.history.insert(0, Said(role="system", text="You act.  \n"))
            for _ in range(20):
                await one.turn(stream=stream, as_sent=as_sent)
            await case.close()
            records = case.records()
            assert len(records) == 20
            before: list[int] = []
            for record in records:
                prompt = case.full_prompt(record)
                assert prompt[: len(before)] == before, record.header
                assert record.header.num_kept_tokens == len(before)
                assert record.header.fork_reason == ""
                before = prompt + record.completion_ids
            (path,), account = case.paths()
            assert path.token_ids == before
            assert account.trained == account.sampled

    asyncio.run(main())


AS_PROGRAMS_ASK = {
    "openai-chat": {"max_tokens": 8000},
    "openai-responses": {"reasoning": {"summary": "auto"}, "parallel_tool_calls": True},
    "anthropic": {"thinking": {"type": "adaptive", "display": "omitted"}},
}


@EACH_PROTOCOL
@pytest.mark.parametrize("has_reasoning", [True, False])
def test_case_02_the_settings_of_the_programs_and_dropped_reasoning_keep_the_branch(
    speaker: Speaker, has_reasoning: bool
) -> None:
    """Claude Code asks not to be shown thinking and sends back its signature, Codex asks for a
    summary; others send no reasoning back at all."""

    async def main() -> None:
        async with open_case({"s0": witness(odd_answer)}) as case:
            one = case.harness(speaker, extra=AS_PROGRAMS_ASK[speaker.name])
            for _ in range(10):
                reply = await one.ask(stream=True)
                form = speaker.as_harness(reply.sent_back)
                form = form if has_reasoning else without_reasoning(form)
                one.keep(reply, form, *("r" for _ in reply.calls))
            await case.close()
            assert [turn.fork_reason for turn in case.rig.told] == [""] * 10
            (path,), _ = case.paths()
            assert len(path.turns) == 10

    asyncio.run(main())


def without_reasoning(form: Any) -> Any:
    if isinstance(form, dict):
        return {key: value for key, value in form.items() if key != "reasoning_content"}
    return [part for part in form if part["type"] not in ("reasoning", "thinking")]


@EACH_PROTOCOL
@EACH_WAY
def test_case_02_malformed_arguments_sent_back_as_its_program_does_keep_the_branch(
    speaker: Speaker, stream: bool
) -> None:
    """Codex sends them verbatim, Claude Code wraps them as raw text."""

    async def main() -> None:
        bad = f'Hm.\n<tool_call>\n{{"name": "bash", "arguments": {MALFORMED}}}\n</tool_call>'
        async with open_case({"s0": witness(by_turn([bad, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await one.turn(stream=stream)
            assert len(reply.calls) == 1
            await one.turn(stream=stream)
            await case.close()
            first, second = case.records()
            assert second.header.parent == first.header.turn
            assert second.header.fork_reason == ""

    asyncio.run(main())
