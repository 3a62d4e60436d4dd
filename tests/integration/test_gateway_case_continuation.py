"""Cases 9, 10 and 12: engines die, leave and come; a harness sees one unbroken answer."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    EACH_WAY,
    SAID,
    Case,
    Harness,
    Witness,
    new_client,
    num_tokens_of,
    open_case,
    read_events,
    text_of,
    witness,
)
from cases_speakers import SPEAKERS, Reply, Said, Speaker
from gateway_rig import TOKENIZER, until

from opengyre.seams.engine import Finish

NUM_TOKENS = num_tokens_of(ANSWER)
ENDINGS: dict[str, Finish | str] = {
    "leaves": Finish.FROZEN,
    "fails": Finish.ERROR,
    "ends without a word": "",
    "is lost in silence": "silent",
}


def answers(**more: Any) -> Witness:
    return witness(lambda text, seed: ANSWER, **more)


def place_of(num_tokens: int) -> str:
    """Where in the answer a cut after so many tokens is."""
    ids = TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
    before = text_of(ids[:num_tokens])
    if not num_tokens:
        return "before the first token"
    if num_tokens >= len(ids):
        return "before the terminal event"
    if "</think>" not in before:
        return "in thinking"
    if "<tool_call>" not in before:
        return "in text"
    return "in tool arguments" if '"arguments"' in before else "in a call's head"


def test_case_09_every_named_place_is_among_the_cuts() -> None:
    places = [place_of(k) for k in range(NUM_TOKENS + 1)]
    assert set(places) == {
        "before the first token",
        "in thinking",
        "in text",
        "in a call's head",
        "in tool arguments",
        "before the terminal event",
    }
    assert places.count("before the terminal event") == 2


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize("how", ENDINGS)
def test_case_09_an_engine_that_goes_at_any_token_costs_its_harness_nothing(
    speaker: Speaker, stream: bool, how: str
) -> None:
    """One execution for each place of the cut; its second engine goes on."""

    async def main() -> None:
        engines: dict[str, Witness] = {"spare": answers()}
        async with open_case(engines) as case:
            whole = case.harness(speaker)
            unbroken = await raw_answer(whole, stream=stream)
            harnesses = [cut_harness(case, speaker, how, k) for k in range(NUM_TOKENS + 1)]
            calls = [raw_answer(one, stream=stream) for one in harnesses]
            assert set(await asyncio.gather(*calls)) == {unbroken}
            assert [one.num_requests for one in harnesses] == [1] * len(harnesses)
            await case.close()
            (reference,) = case.records()
            for k, one in enumerate(harnesses):
                (record,) = case.records(one.execution)
                assert record.completion_ids == reference.completion_ids
                assert record.logprobs == reference.logprobs
                ends = [span.end for span in record.header.spans]
                assert ends == sorted({k, NUM_TOKENS} - {0}), place_of(k)
                assert record.header.is_committed

    asyncio.run(main())


def cut_harness(case: Case, speaker: Speaker, how: str, cut_at: int) -> Harness:
    """Of an execution whose engine goes after `cut_at` tokens; it is then routed to the spare."""
    execution = f"e1{cut_at:05d}"
    name = f"c{cut_at}"

    def lost() -> None:
        if how == "is lost in silence":
            case.rig.gateway.engine_lost(name)
        case.rig.gateway.set_routes({execution: "spare"})

    engine = answers(cut_at=cut_at, how=ENDINGS[how])
    engine.on_cut = lost
    case.engines[name] = engine
    case.rig.gateway.connect_engine(name, engine, 0)
    return case.harness(speaker, **case.open(execution, name))


async def raw_answer(one: Harness, *, stream: bool) -> str:
    """Every byte of an answer, without what names its execution and its time."""
    one.num_requests += 1
    body = one.body(stream=stream)
    answer = await one.client.post(one.url, headers=one.headers, json=body)
    assert answer.status_code == 200, answer.text
    told = re.sub(r"e\d{6}", "EXECUTION", answer.text)
    return re.sub(r'"created(_at)?":\d+', '"created":0', told)


@EACH_PROTOCOL
def test_case_09_an_engine_that_goes_after_every_token_is_followed_by_the_next(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        engines = {f"s{k}": answers(cut_at=1) for k in range(NUM_TOKENS)}
        async with open_case(engines) as case:
            one = case.harness(speaker)
            names = list(engines)

            def move() -> None:
                names.pop(0)
                if names:
                    case.rig.gateway.set_routes({"e000001": names[0]})

            for engine in engines.values():
                engine.on_cut = move
            reply = await one.ask(stream=True)
            assert reply.said == SAID
            await case.close()
            (record,) = case.records()
            assert [span.engine for span in record.header.spans] == list(engines)

    asyncio.run(main())


@EACH_PROTOCOL
@EACH_WAY
def test_case_09_requests_of_sub_agents_at_once_all_survive_their_engines_death(
    speaker: Speaker, stream: bool
) -> None:
    """Of one execution: the main one and two more, at different places of their answers."""

    async def main() -> None:
        engines = {"c1": answers(stalls={0: 5, 1: 25, 2: 45}), "spare": answers()}
        async with open_case(engines) as case:
            all_three = [
                case.harness(speaker, history=[Said(role="user", text=f"Task {k}.")])
                for k in range(3)
            ]
            calls = [asyncio.create_task(one.ask(stream=stream)) for one in all_three]
            await engines["c1"].has_given(5 + 25 + 45)
            case.rig.gateway.engine_lost("c1")
            await until(lambda: case.rig.gateway.held() == {"e000001": 3})
            case.rig.gateway.set_routes({"e000001": "spare"})
            assert [(await call).said for call in calls] == [SAID] * 3
            await case.close()
            assert [one.num_requests for one in all_three] == [1, 1, 1]
            assert {turn.num_continuations for turn in case.rig.told} == {1}
            assert case.rig.holds == [("e000001", True), ("e000001", False)]
            paths, account = case.paths()
            assert len(paths) == 3
            assert account.trained == account.sampled

    asyncio.run(main())


async def held_call(case: Case, speaker: Speaker, *, stream: bool, is_first: bool) -> Any:
    """(reply, seconds, longest silence) of a call whose engine goes, before or in its answer."""
    name = f"{speaker.name}-{stream}-{is_first}"
    execution = f"e2{len(case.executions):05d}"
    engine = answers(cut_at=None if is_first else 9)
    case.engines[name] = engine
    case.rig.gateway.connect_engine(name, engine, 0)
    one = case.harness(speaker, **case.open(execution, name))
    if is_first:
        case.rig.gateway.close_door(name)
    else:
        engine.on_cut = lambda: case.rig.gateway.close_door(name)
    began_s = time.monotonic()
    text, gaps = await timed(one, one.body(stream=stream))
    assert engine.requests
    return one, text, time.monotonic() - began_s, max(gaps)


async def timed(one: Harness, body: Any) -> tuple[str, list[float]]:
    """The text of an answer, and the seconds between its parts."""
    seen, gaps, last_s = b"", [], time.monotonic()
    call = one.client.stream("POST", one.url, headers=one.headers, json=body)
    async with call as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_raw():
            gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()
            seen += part
    return seen.decode(), gaps


@pytest.mark.timeout(110)
def test_case_10_no_engine_for_60_seconds_is_held_with_comments_and_then_finishes() -> None:
    """All protocols at once, streamed and not, before the first token and in the answer."""

    async def main() -> None:
        hold_s = 60.0
        async with open_case({"s0": answers()}) as case, new_client(100.0) as patient:
            case.client = patient
            kinds = [(s, w, f) for s in SPEAKERS for w in (True, False) for f in (True, False)]
            calls = [
                asyncio.create_task(held_call(case, speaker, stream=stream, is_first=first))
                for speaker, stream, first in kinds
            ]
            began_s = time.monotonic()
            await until(lambda: len(case.rig.gateway.held()) == len(kinds))
            await asyncio.sleep(hold_s - (time.monotonic() - began_s))
            assert sum(case.rig.gateway.held().values()) == len(kinds)
            assert not any(call.done() for call in calls)
            for name in case.engines:
                case.rig.gateway.open_door(name)
            for call, (speaker, stream, _) in zip(calls, kinds, strict=True):
                one, text, total_s, longest_s = await call
                assert total_s >= hold_s - 1
                reply = read(one.speaker, text, stream=stream)
                assert reply.said == SAID
                if stream:
                    assert longest_s < 10, "a client may take longer silence for a dead server"
                    assert text.count("\n\n:") + text.startswith(":") >= 5, speaker.name
            await case.harness(SPEAKERS[0]).ask(stream=False)

    asyncio.run(main())


def read(speaker: Speaker, text: str, *, stream: bool) -> Reply:
    if not stream:
        return speaker.whole(json.loads(text))
    return speaker.streamed(read_events(text)[0])


@EACH_PROTOCOL
def test_case_10_waiting_is_bounded_and_ends_in_the_protocols_503_with_retry_after(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        async with open_case({"s0": answers()}, hold_max_s=0.3, hold_comment_s=5) as case:
            one = case.harness(speaker)
            await one.ask(stream=True)
            case.rig.gateway.close_door("s0")
            for stream in (True, False):
                body = one.body(stream=stream)
                answer = await one.client.post(one.url, headers=one.headers, json=body)
                assert answer.status_code in (429, 503)
                assert int(answer.headers["retry-after"]) > 0
                assert one.speaker.error_kind(answer.json())
            case.rig.gateway.open_door("s0")
            assert (await one.ask(stream=True)).said == SAID

    asyncio.run(main())


async def read_into(seen: bytearray, one: Harness) -> None:
    body = one.body(stream=True)
    async with one.client.stream("POST", one.url, headers=one.headers, json=body) as answer:
        async for part in answer.aiter_raw():
            seen += part


@EACH_PROTOCOL
@pytest.mark.parametrize("has_text", [True, False], ids=["after text", "after comments"])
def test_case_10_what_began_and_cannot_go_on_is_reset_and_never_a_clean_end(
    speaker: Speaker, has_text: bool
) -> None:
    async def main() -> None:
        engine = answers(cut_at=9 if has_text else 0)
        async with open_case(
            {"s0": engine, "s1": answers()}, hold_max_s=0.5, hold_comment_s=0.1
        ) as case:
            one = case.harness(speaker)
            engine.on_cut = lambda: case.rig.gateway.close_door("s0")
            seen = bytearray()
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                await read_into(seen, one)
            told = bytes(seen)
            assert told
            terminal = (b"[DONE]", b"message_stop", b"completed", b"failed", b"event: error")
            assert not any(word in told for word in terminal), told
            case.rig.gateway.set_routes({"e000001": "s1"})
            assert (await one.ask(stream=True)).said == SAID
            await case.close()
            assert [(t.turn, t.attempt) for t in case.rig.told] == [
                ("e000001.t1", 0),
                ("e000001.t1", 1),
            ]

    asyncio.run(main())


@EACH_PROTOCOL
@EACH_WAY
def test_case_12_turns_of_a_branch_stay_on_their_engine_while_it_serves(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        engines = {"s0": answers(), "s1": answers(), "s2": answers()}
        async with open_case(engines) as case:
            one = case.harness(speaker)
            for k in range(8):
                if k == 4:
                    case.rig.gateway.set_routes({"e000001": "s2"})
                await one.turn(stream=stream)
            await case.close()
            served = [{span.engine for span in turn.spans} for turn in case.rig.told]
            assert served == [{"s0"}] * 4 + [{"s2"}] * 4
            assert engines["s1"].requests == []
            (path,), _ = case.paths()
            assert len(path.turns) == 8

    asyncio.run(main())
