"""Cases 3, 4 and 5: what a harness made of an answer decides whether its branch goes on."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    EACH_WAY,
    Case,
    Harness,
    arguments_of,
    by_turn,
    open_case,
    renamed,
    text_of,
    tool_calls_of,
    witness,
)
from cases_speakers import (
    SPEAKERS,
    Answered,
    Results,
    Said,
    Speaker,
    ToolSpec,
    compact,
    parsed,
)

CHAT, RESPONSES, MESSAGES = SPEAKERS
VALUES: dict[str, Any] = {"command": "ls é\n", "timeout": 5000.0, "deep": {"b": [1, None], "a": ""}}
TOLD = json.dumps(VALUES, separators=(" ,", " : "))
LOOK = f"<think>\nLook first.\n\n</think>\n\nI look.\n\n{tool_calls_of(TOLD)}"
PWD = '{"command": "pwd"}'
FULL = f"{LOOK}\n{tool_calls_of(PWD)}"


def same_values(value: Any) -> Any:
    return value


def reversed_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: reversed_keys(value[key]) for key in reversed(list(value))}


def floats(value: Any) -> Any:
    """5000 as 5000.0, as JSON libraries of other languages write it."""
    if isinstance(value, dict):
        return {key: floats(one) for key, one in value.items()}
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number else value


SAME: list[Callable[[Any], Any]] = [same_values, reversed_keys, floats]
OTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another text": lambda value: {**value, "command": "ls e\n"},
    "a key less": lambda value: {key: value[key] for key in list(value)[1:]},
    "a key more": lambda value: {**value, "new": None},
    "a number as a text": lambda value: {**value, "timeout": "5000"},
    "true for a number": lambda value: {**value, "timeout": True},
    "blanks at its end": lambda value: {**value, "command": str(value.get("command", "")) + " "},
    "absent and null": lambda value: {**value, "deep": None},
    "another order in a list": lambda value: {**value, "deep": {"b": [None, 1], "a": ""}},
}


async def first_reply(one: Harness, *, stream: bool) -> Any:
    reply = await one.ask(stream=stream)
    assert len(reply.calls) == 2, reply
    return reply


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("change", SAME)
def test_case_03_equal_as_parsed_values_attaches(
    speaker: Speaker, stream: bool, change: Callable[[Any], Any]
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await first_reply(one, stream=stream)
            one.keep(reply, speaker.with_values(reply.sent_back, change), "r0", "r1")
            await one.ask(stream=stream)
            await case.close()
            first, second = case.records()
            assert (second.header.parent, second.header.fork_reason) == (first.header.turn, "")
            whole = case.full_prompt(first) + first.completion_ids
            assert case.full_prompt(second)[: len(whole)] == whole

    asyncio.run(main())


@EACH_PROTOCOL
@pytest.mark.parametrize("what", OTHER)
def test_case_03_another_meaning_forks_with_a_reason_and_keeps_both(
    speaker: Speaker, what: str
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await first_reply(one, stream=True)

            def change(value: dict[str, Any]) -> Any:
                return OTHER[what](value) if "timeout" in value else value

            one.keep(reply, speaker.with_values(reply.sent_back, change), "r0", "r1")
            await one.ask(stream=True)
            await case.close()
            assert_forked(case)

    asyncio.run(main())


def assert_forked(case: Case) -> None:
    """The old answer's tokens are not gone on from, and both answers are trained."""
    first, second = case.records()
    assert second.header.fork_reason
    whole = case.full_prompt(first) + first.completion_ids
    assert case.full_prompt(second)[: len(whole)] != whole
    paths, account = case.paths()
    assert [path.turns for path in paths] == [(first.header.turn,), (second.header.turn,)]
    assert account.trained == account.sampled


def in_text(old: str, new: str) -> Callable[[Any], Any]:
    def change(form: Any) -> Any:
        return json.loads(json.dumps(form).replace(old, new))

    return change


def without_last_call(form: Any) -> Any:
    if isinstance(form, dict):
        return {**form, "tool_calls": form["tool_calls"][:-1]}
    return form[:-1]


def calls_swapped(form: Any) -> Any:
    if isinstance(form, dict):
        return {**form, "tool_calls": form["tool_calls"][::-1]}
    return [*form[:-2], form[-1], form[-2]]


REWRITTEN: dict[str, Callable[[Any], Any]] = {
    "its text": in_text("I look.", "I looked."),
    "a call's name": in_text('"bash"', '"sh"'),
    "a call less": without_last_call,
    "its calls in another order": calls_swapped,
}


@EACH_PROTOCOL
@pytest.mark.parametrize("what", REWRITTEN)
def test_case_03_a_rewritten_message_forks_with_a_reason_and_keeps_both(
    speaker: Speaker, what: str
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await first_reply(one, stream=True)
            form = REWRITTEN[what](reply.sent_back)
            assert form != reply.sent_back
            one.history.append(Answered(form=form))
            num_kept = 1 if what == "a call less" else 2
            pairs = [(call.call_id, "r") for call in reply.calls[:num_kept]]
            one.history.append(Results(pairs=tuple(pairs)))
            await one.ask(stream=True)
            await case.close()
            assert_forked(case)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_case_03_rewritten_reasoning_that_is_shown_again_forks(stream: bool) -> None:
    """Only chat has reasoning that a harness can rewrite; elsewhere it is signed or sealed."""

    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, "done"]))}) as case:
            one = case.harness(CHAT)
            reply = await first_reply(one, stream=stream)
            form = in_text("Look first.", "Look last.")(reply.sent_back)
            assert form != reply.sent_back
            one.keep(reply, form, "r0", "r1")
            await one.ask(stream=stream)
            await case.close()
            assert_forked(case)

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_03_a_deleted_answer_forks_and_is_not_dropped(speaker: Speaker) -> None:
    """mini-swe-agent deletes an answer whose arguments it cannot read."""

    async def main() -> None:
        bad = 'Hm. <tool_call>\n{"name": "bash", "arguments": {"a": }}\n</tool_call>'
        async with open_case({"s0": witness(by_turn([ANSWER, bad, "done"]))}) as case:
            one = case.harness(speaker)
            await one.turn(stream=False)
            await one.ask(stream=False)
            one.history.append(Said(role="user", text="No tool call was found."))
            reply = await one.ask(stream=False)
            await case.close()
            first, second, third = case.records()
            assert second.header.parent == third.header.parent == first.header.turn
            assert third.header.num_kept_tokens == second.header.num_kept_tokens
            paths, account = case.paths()
            assert account.trained == account.sampled
            assert reply.num_completion_tokens == len(third.completion_ids)
            assert len(paths) == 2

    asyncio.run(main())


def random_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return dice.choice([None, True, False, "", 0, -1, 2**53, 10**21, 1e22, 0.1, -2.5e-7])
        case 1:
            return dice.choice([5000.0, 1.50, 3, 2**31, 1e300])
        case 5:
            return [random_value(dice, depth + 1) for _ in range(dice.randrange(4))]
        case 6:
            return {
                random_text(dice): random_value(dice, depth + 1) for _ in range(dice.randrange(4))
            }
    return random_text(dice)


def random_text(dice: random.Random) -> str:
    letters = 'aé😀 \\"/\n\t<>{}[]:,\u2028\u0000\x7f0'
    return "".join(dice.choice(letters) for _ in range(dice.randrange(6)))


@EACH_PROTOCOL
def test_case_03_random_arguments_attach_when_equal_and_fork_when_not(speaker: Speaker) -> None:
    async def main() -> None:
        dice = random.Random(3)
        for _ in range(6):
            value = {random_text(dice): random_value(dice) for _ in range(3)}
            told = json.dumps(
                value, ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, 2])
            )
            async with open_case({"s0": witness(by_turn([tool_calls_of(told), "done"]))}) as case:
                for change, is_same in ((reversed_keys, True), (with_one_more, False)):
                    one = case.harness(speaker, history=[Said(role="user", text=str(is_same))])
                    reply = await one.ask(stream=True)
                    assert parsed(arguments_of(reply)[0]) == parsed(told)
                    form = speaker.with_values(reply.sent_back, change)
                    one.keep(reply, form, "result")
                    await one.ask(stream=True)
                    header = case.rig.recorder.records[-1].header
                    assert (header.fork_reason == "") == is_same, (told, compact(value))

    asyncio.run(main())


def with_one_more(value: Any) -> Any:
    return {**value, "one more": 1}


@EACH_PROTOCOL
@EACH_WAY
def test_case_04_reordered_parallel_results_attach_in_the_harnesss_order(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        three = tool_calls_of('{"command": "a"}', '{"command": "b"}', '{"command": "c"}')
        async with open_case({"s0": witness(by_turn([three, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await one.ask(stream=stream)
            ids = [call.call_id for call in reply.calls]
            pairs = ((ids[2], "third ended"), (ids[0], "first ended"), (ids[1], "second ended"))
            one.history += [
                Answered(form=speaker.as_harness(reply.sent_back)),
                Results(pairs=pairs),
            ]
            await one.ask(stream=stream)
            await case.close()
            first, second = case.records()
            assert (second.header.parent, second.header.fork_reason) == (first.header.turn, "")
            told = text_of(second.new_prompt_ids)
            places = [told.index(text) for _, text in pairs]
            assert places == sorted(places)

    asyncio.run(main())


def absent_content(form: Any) -> Any:
    return {key: value for key, value in form.items() if key != "content"}


EMPTY: dict[str, Callable[[Any], Any]] = {
    "null": lambda form: {**form, "content": None},
    "empty": lambda form: {**form, "content": ""},
    "absent": absent_content,
    "no parts": lambda form: {**form, "content": []},
    "no reasoning": lambda form: {**form, "reasoning_content": None},
    "empty reasoning": lambda form: {**form, "reasoning_content": ""},
}


@pytest.mark.parametrize("how", EMPTY)
def test_case_05_null_empty_and_absent_content_cause_no_fork(how: str) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(by_turn([tool_calls_of("{}"), "done"]))}) as case:
            one = case.harness(CHAT)
            reply = await one.ask(stream=False)
            one.keep(reply, EMPTY[how](reply.sent_back), "r")
            await one.ask(stream=False)
            await case.close()
            assert [turn.fork_reason for turn in case.rig.told] == ["", ""]
            assert case.rig.told[1].parent

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_05_other_ids_cause_no_fork(speaker: Speaker) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await first_reply(one, stream=True)
            one.keep(reply, speaker.as_harness(reply.sent_back), "r0", "r1")
            body = one.body(stream=True)
            await one.send(renamed(reply.calls, body, lambda old: "x" + old[::-1]))
            await case.close()
            assert [turn.fork_reason for turn in case.rig.told] == ["", ""]
            assert case.rig.told[1].parent

    asyncio.run(main())


def test_case_05_cache_control_that_moves_causes_no_fork() -> None:
    """The rig's Messages client moves it to the newest block at each turn, as Claude Code does;
    here it also stands at tools and system blocks of every second turn, and as a plain string."""

    async def main() -> None:
        async with open_case({"s0": witness(by_turn([ANSWER, ANSWER, "done"]))}) as case:
            one = case.harness(MESSAGES)
            one.history.insert(0, Said(role="system", text="You act."))
            mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
            await one.turn(stream=True)
            body = one.body(stream=True)
            body["system"][-1] |= mark
            body["tools"][-1] |= mark
            body["messages"][0]["content"] = "Do it."
            reply = await one.send(body)
            one.keep(reply, one.speaker.as_harness(reply.sent_back), "r")
            body = one.body(stream=True)
            body["system"] = "You act."
            await one.send(body)
            await case.close()
            assert [turn.fork_reason for turn in case.rig.told] == ["", "", ""]
            assert [turn.parent for turn in case.rig.told] == ["", "e000001.t1", "e000001.t2"]

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_03_an_older_answer_rewritten_forks_and_what_follows_it_is_not_gone_on_from(
    speaker: Speaker,
) -> None:
    """As a harness does that edits its history; the branch it leaves stays trained."""

    async def main() -> None:
        async with open_case({"s0": witness(by_turn([FULL, ANSWER, ANSWER, "done"]))}) as case:
            one = case.harness(speaker)
            reply = await first_reply(one, stream=True)
            one.keep(reply, speaker.as_harness(reply.sent_back), "r0", "r1")
            for _ in range(2):
                await one.turn(stream=True)
            edited = in_text("I look.", "I looked.")(one.history[1].form)
            one.history[1] = Answered(form=edited)
            await one.ask(stream=True)
            await case.close()
            last = case.rig.told[-1]
            assert last.fork_reason
            first = case.records()[0]
            assert last.num_kept_tokens < len(case.full_prompt(first)) + len(first.completion_ids)
            paths, account = case.paths()
            assert [len(path.turns) for path in paths] == [3, 1]
            assert account.trained == account.sampled

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_03_a_history_cut_back_to_an_earlier_turn_is_a_branch_of_that_turn(
    speaker: Speaker,
) -> None:
    """As after an undo, or where a harness drops its last bad turns: nothing is rendered anew."""

    async def main() -> None:
        async with open_case({"s0": witness(by_turn([ANSWER]))}) as case:
            one = case.harness(speaker)
            for _ in range(3):
                await one.turn(stream=True)
            del one.history[3:]
            await one.turn(stream=True)
            await one.turn(stream=True)
            await case.close()
            told = {turn.turn: turn for turn in case.rig.told}
            assert told["e000001.t4"].parent == "e000001.t1"
            assert [turn.fork_reason for turn in told.values()] == [""] * 5
            paths, account = case.paths()
            assert sorted(len(path.turns) for path in paths) == [2, 3]
            assert account.trained == account.sampled

    asyncio.run(main())


EDIT: ToolSpec = (
    "edit",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "all": {"type": "boolean", "default": False},
        },
    },
)


@EACH_PROTOCOL
@pytest.mark.parametrize(("value", "is_same"), [(False, True), (True, False), (None, False)])
def test_case_03_a_default_of_the_schema_that_a_harness_writes_in_attaches_and_no_other_value(
    speaker: Speaker, value: Any, is_same: bool
) -> None:
    """Claude Code fills in the defaults of its tools."""

    async def main() -> None:
        told = '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>'
        async with open_case({"s0": witness(by_turn([told, "done"]))}) as case:
            one = case.harness(speaker, tools=(EDIT,))
            reply = await one.ask(stream=True)
            form = speaker.with_values(reply.sent_back, lambda sent: {**sent, "all": value})
            one.keep(reply, form, "edited")
            await one.ask(stream=True)
            await case.close()
            second = case.rig.told[1]
            assert (second.fork_reason == "") == is_same

    asyncio.run(main())
