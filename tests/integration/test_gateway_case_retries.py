"""Case 8: a retry gives exactly one trainable turn; honest identical requests are not merged."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    Case,
    Harness,
    num_tokens_of,
    open_case,
    text_of,
    tool_calls_of,
    witness,
)
from cases_speakers import Answered, Json, Results, Said, Speaker
from gateway_rig import until

from opengyre.trajectory.turns import ForkReason

FIRST = '{"command": "first call"}'
SECOND = '{"command": "second call"}'
TWO_CALLS = f"<think>\nTwo.\n</think>\n\nBoth now.\n\n{tool_calls_of(FIRST, SECOND)}"
SEEN = b"W"
AFTER_SEEN = num_tokens_of(ANSWER[: ANSWER.index("<tool_call>")]) - 1
"""Tokens of ANSWER's text; what a client waits for is among them."""


def shuffled(value: Any, dice: random.Random) -> Any:
    """The same JSON with its keys in another order everywhere."""
    if isinstance(value, list):
        return [shuffled(one, dice) for one in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    dice.shuffle(keys)
    return {key: shuffled(value[key], dice) for key in keys}


def assert_one_trained_turn(case: Case) -> None:
    committed = [turn for turn in case.rig.told if turn.is_committed]
    assert len(committed) == 1
    (path,), account = case.paths()
    assert path.turns == (committed[0].turn,)
    assert account.trained == committed[0].num_completion_tokens
    lost = sum(t.num_completion_tokens for t in case.rig.told if not t.is_committed)
    assert sum(account.dropped.values()) == lost


@EACH_PROTOCOL
@pytest.mark.parametrize("num_drops", [1, 3])
@pytest.mark.parametrize("how", ["unmarked", "marked", "shuffled keys"])
def test_case_08_a_retry_after_a_drop_gives_one_trainable_turn(
    speaker: Speaker, how: str, num_drops: int
) -> None:
    async def main() -> None:
        dice = random.Random(1)
        stalls = dict.fromkeys(range(num_drops), AFTER_SEEN)
        async with open_case({"s0": witness(lambda t, s: ANSWER, stalls=stalls)}) as case:
            one = case.harness(speaker, extra={"client_metadata": {"a": 1, "b": 2, "c": 3}})
            body = one.body(stream=True)
            for attempt in range(num_drops):
                await one.leave(body, after=SEEN, headers=marks(how, attempt))
                if how == "shuffled keys":
                    body = shuffled(body, dice)
            reply = await one.send(body, headers=marks(how, num_drops))
            assert reply.ending == "calls"
            await case.close()
            tries = [(turn.turn, turn.attempt) for turn in case.rig.told]
            assert tries == [("e000001.t1", k) for k in range(num_drops + 1)]
            assert_one_trained_turn(case)

    asyncio.run(main())


def marks(how: str, attempt: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(attempt)} if how == "marked" else {}


@EACH_PROTOCOL
def test_case_08_a_marked_retry_supersedes_an_attempt_that_still_runs(speaker: Speaker) -> None:
    """Its client gave up on it, but its connection is still there."""

    async def main() -> None:
        engine = witness(lambda t, s: ANSWER, stalls={0: AFTER_SEEN})
        async with open_case({"s0": engine}) as case:
            one = case.harness(speaker)
            body = one.body(stream=True)
            stuck = asyncio.create_task(one.leave(body, after=b"never"))
            await engine.has_given(AFTER_SEEN)
            reply = await one.send(body, headers={"x-stainless-retry-count": "1"})
            assert reply.ending == "calls"
            await asyncio.wait([stuck])
            assert stuck.exception() is not None
            await case.close()
            assert_one_trained_turn(case)

    asyncio.run(main())


def first_parts(form: Any) -> Any:
    """An answer up to the end of its first call."""
    if isinstance(form, dict):
        return {**form, "tool_calls": form["tool_calls"][:1]}
    kinds = [part["type"] in ("tool_use", "function_call") for part in form]
    return form[: kinds.index(True) + 1]


async def unbroken_form(case: Case, speaker: Speaker) -> Any:
    """The whole answer of another execution, with the ids that the first execution would have."""
    harness = case.harness(speaker, **case.open("e000002", "s0"))
    reply = await harness.ask(stream=True)
    return json.loads(json.dumps(reply.sent_back).replace("e000002", "e000001"))


@EACH_PROTOCOL
def test_case_08_a_retry_with_a_grown_history_goes_on_from_the_same_tokens(
    speaker: Speaker,
) -> None:
    """Codex keeps the items that were finished when the stream was dropped, runs their calls,
    and tries again with them and their results."""

    async def main() -> None:
        num_tokens = num_tokens_of(TWO_CALLS) - 2
        engine = witness(lambda t, s: TWO_CALLS, stalls={1: num_tokens})
        async with open_case({"s0": engine}) as case:
            parts = first_parts(await unbroken_form(case, speaker))
            one = case.harness(speaker)
            seen = await one.leave(one.body(stream=True), after=b"call_e000001_t1_a0_1")
            assert b"call_e000001_t1_a0_0" in seen
            await until(lambda: case.rig.told[-1].finish == "cancelled")
            one.history += [Answered(form=parts), Results(pairs=(call_result(parts),))]
            await one.ask(stream=True)
            await case.close()
            cut, grown = case.records()
            assert (cut.header.is_committed, grown.header.is_committed) == (False, True)
            prompt = case.full_prompt(grown)
            num_before = len(case.full_prompt(cut))
            assert prompt[:num_before] == case.full_prompt(cut)
            assert FIRST in text_of(shared(prompt[num_before:], cut.completion_ids))
            assert "second" not in text_of(prompt)
            paths, account = case.paths()
            assert [path.turns for path in paths] == [(grown.header.turn,)]
            assert account.trained == len(grown.completion_ids)

    asyncio.run(main())


def shared(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    size = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    return one[:size]


def call_result(parts: Any) -> tuple[str, str]:
    call = parts["tool_calls"][0] if isinstance(parts, dict) else parts[-1]
    return str(call.get("call_id") or call["id"]), "done by the harness"


@EACH_PROTOCOL
def test_case_08_two_honest_identical_requests_are_not_merged(speaker: Speaker) -> None:
    async def main() -> None:
        engine = witness(lambda t, seed: f"The seed is {seed}.", tokens_per_s=1000)
        async with open_case({"s0": engine}) as case:
            one = case.harness(speaker)
            body = one.body(stream=True)
            both = await asyncio.gather(one.send(body), one.send(body))
            later = await one.send(body)
            assert len({reply.text for reply in (*both, later)}) == 3
            await case.close()
            assert sorted(turn.turn for turn in case.rig.told) == [
                f"e000001.t{k}" for k in (1, 2, 3)
            ]
            _, account = case.paths()
            assert account.trained == account.sampled

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_08_a_retry_of_one_of_two_identical_requests_leaves_the_other_alone(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        engine = witness(lambda t, seed: f"The seed is {seed}. " * 6, stalls={0: 9, 1: 9})
        async with open_case({"s0": engine}) as case:
            one = case.harness(speaker)
            body: Json = one.body(stream=True)
            honest = asyncio.create_task(one.send(body))
            await until(lambda: engine.requests)
            await one.leave(body, after=b' is"')
            again = await one.send(body)
            assert again.ending == "stop"
            case.rig.gateway.engine_lost("s0")
            case.rig.gateway.connect_engine("s0", engine, 1)
            assert (await honest).text != again.text
            await case.close()
            ends = sorted((t.turn, t.attempt, t.is_committed) for t in case.rig.told)
            assert ends == [
                ("e000001.t1", 0, True),
                ("e000001.t2", 0, False),
                ("e000001.t2", 1, True),
            ]

    asyncio.run(main())


@EACH_PROTOCOL
def test_case_08_a_whole_answer_asked_for_again_unstreamed_after_a_drop_is_one_trainable_turn(
    speaker: Speaker,
) -> None:
    """Claude Code asks again without `stream`."""

    async def main() -> None:
        stalls = {0: AFTER_SEEN}
        async with open_case({"s0": witness(lambda t, s: ANSWER, stalls=stalls)}) as case:
            one: Harness = case.harness(speaker)
            await one.leave(one.body(stream=True), after=SEEN)
            body = one.body(stream=True)
            del body["stream"]
            await one.send(body)
            await case.close()
            assert_one_trained_turn(case)

    asyncio.run(main())


@EACH_PROTOCOL
@pytest.mark.parametrize("seen", ["before a byte", "with the first byte"])
def test_case_08_a_retry_at_once_is_never_a_second_turn_however_early_its_client_left(
    speaker: Speaker, seen: str
) -> None:
    async def main() -> None:
        num_given = 0 if seen == "before a byte" else 1
        stalls = {2 * k: num_given for k in range(10)}
        engine = witness(lambda t, s: "A word or two.", stalls=stalls)
        async with open_case({"s0": engine}) as case:
            for k in range(10):
                one = case.harness(speaker, history=[Said(role="user", text=f"task {k}")])
                body = one.body(stream=True)
                if seen == "before a byte":
                    await leave_before_a_byte(one, body, lambda k=k: len(engine.requests) == 2 * k)
                else:
                    await one.leave(body, after=b"\n")
                await one.send(body)
            await case.close()
            tries = sorted((int(t.turn[9:]), t.attempt, t.is_committed) for t in case.rig.told)
            assert tries == [(k + 1, a, bool(a)) for k in range(10) for a in (0, 1)]

    asyncio.run(main())


async def leave_before_a_byte(one: Harness, body: Json, is_too_early: Callable[[], bool]) -> None:
    """Gone when its request has reached the engine."""
    data = json.dumps(body).encode()
    address = one.rig.gateway
    _, writer = await asyncio.open_connection(address.host, address.port)
    path = one.url.removeprefix(address.address)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in one.headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await until(lambda: not is_too_early())
    writer.close()


PARTS = ["thinking", "text", "a call"]


def kept_parts(form: Any, last: str) -> Any:
    if isinstance(form, dict):
        kept = {"role": "assistant", "reasoning_content": form["reasoning_content"]}
        kept |= {} if last == "thinking" else {"content": form["content"]}
        return kept | ({"tool_calls": form["tool_calls"][:1]} if last == "a call" else {})
    return form[: {"thinking": 1, "text": 2, "a call": 3}[last]]


@EACH_PROTOCOL
@pytest.mark.parametrize("how", ["later", "at once"])
@pytest.mark.parametrize("last", PARTS)
def test_case_08_a_grown_history_is_gone_on_from_for_many_turns(
    speaker: Speaker, last: str, how: str
) -> None:
    """Whatever whole parts a client kept of the cut answer, its later turns are one branch."""

    async def main() -> None:
        engine = witness(lambda t, s: TWO_CALLS, stalls={1: num_tokens_of(TWO_CALLS) - 2})
        async with open_case({"s0": engine}) as case:
            form = kept_parts(await unbroken_form(case, speaker), last)
            one = case.harness(speaker)
            await one.leave(one.body(stream=True), after=b"call_e000001_t1_a0_1")
            if how == "later":
                await until(lambda: case.rig.told[-1].finish == "cancelled")
            one.history.append(Answered(form=speaker.as_harness(form)))
            if last == "a call":
                one.history.append(Results(pairs=(call_result(form),)))
            else:
                one.history.append(Said(role="user", text="You were cut off. Go on."))
            for _ in range(3):
                await one.turn(stream=True)
            await case.close()
            cut, grown, *later = case.records()
            prompt = case.full_prompt(grown)
            before = case.full_prompt(cut)
            assert prompt[: len(before)] == before
            kept = text_of(shared(prompt[len(before) :], cut.completion_ids))
            assert "Two." in kept
            assert ("Both now." in kept) == (last != "thinking")
            assert (FIRST in kept) == (last == "a call")
            assert grown.header.fork_reason == ForkReason.KEPT_PARTS
            assert [record.header.fork_reason for record in later] == ["", ""]
            (path,), account = case.paths()
            assert len(path.turns) == 3
            assert sum(account.dropped.values()) == len(cut.completion_ids)

    asyncio.run(main())
