"""Idle prefixes: an execution inside a tool call finds its next turn warm at another engine."""

import asyncio
from typing import Any

import pytest
from engine_under_test import prompt_of
from handoff_rig import (
    KINDS,
    LOGPROB_GAP,
    Kind,
    ask,
    forged,
    hear,
    hear_some,
    kind_params,
    nothing_left,
    play,
    publish,
)

from opengyre.seams.kv import KVRelease


@pytest.fixture(params=kind_params())
def kind(request: Any) -> Kind:
    return KINDS[request.param]


def test_the_next_turn_is_warm_where_its_prefix_was_imported(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        turn = ask(prompt_of(50), 10)
        first = await hear(source.submit(turn))
        (ref,) = await source.export_kv()
        assert ref.execution == turn.execution
        known = turn.prompt_ids + first.ids
        assert ref.ids == known[: ref.num_tokens]
        assert ref.num_tokens >= 50
        taken = await destination.import_kv(ref)
        assert (taken.ref, taken.num_tokens, taken.reason) == (ref.ref, ref.num_tokens, "")
        assert await source.release_kv(ref.ref) is KVRelease.RELEASED
        second = ask(known + prompt_of(6, seed=1), 12, name="r1")
        before = destination.stats()
        made = await hear(destination.submit(second))
        after = destination.stats()
        assert after.num_reused_tokens - before.num_reused_tokens == ref.num_tokens
        num_left = len(second.prompt_ids) - ref.num_tokens
        assert after.num_prefill_tokens - before.num_prefill_tokens == num_left
        expected = await hear(alone.submit(second))
        assert made.ids == expected.ids
        assert made.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_GAP)
        for engine in engines:
            await nothing_left(engine)

    play(scene, kind, 3, kv_handoff_idle=True)


def test_with_idle_prefixes_off_none_are_exported(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        for engine in engines:
            await hear(engine.submit(ask(prompt_of(50), 10)))
            assert await engine.export_kv() == []
            assert engine.stats().num_pinned == 0
            await nothing_left(engine)

    play(scene, kind, 1, kv_handoff_idle=False)
    play(scene, kind, 1, kv_handoff="off", kv_handoff_idle=True)


def test_only_executions_of_which_nothing_runs_are_exported(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        await hear(source.submit(ask(prompt_of(30), 5, name="a", execution="e1")))
        await hear(source.submit(ask(prompt_of(31), 5, name="b", execution="e2")))
        running = source.submit(ask(prompt_of(20), 90, name="c", execution="e2"))
        begun = await hear_some(running, 1)
        refs = await source.export_kv()
        assert [one.execution for one in refs] == ["e1"]
        await source.cancel("c")
        await hear(running, begun)
        for ref in refs:
            await source.release_kv(ref.ref)
        await nothing_left(source)

    play(scene, kind, 1, kv_handoff_idle=True, tokens_per_s=300.0)


def test_an_exported_prefix_ends_with_its_lease_and_is_not_lost_to_its_engine(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        turn = ask(prompt_of(50), 10)
        first = await hear(source.submit(turn))
        refs = await source.export_kv()
        assert source.stats().num_pinned == len(refs) == 1
        again = await hear(source.submit(ask(turn.prompt_ids + first.ids, 5, name="r1")))
        assert len(again.ids) == 5
        await nothing_left(source)
        assert await source.release_kv(refs[0].ref) is KVRelease.LEASE_ENDED
        assert await source.release_kv(refs[0].ref) is KVRelease.UNKNOWN

    play(scene, kind, 1, kv_handoff_idle=True, kv_lease_s=0.1)


def test_a_full_engine_still_serves_while_idle_prefixes_are_pinned(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        for n in range(8):
            await hear(source.submit(ask(prompt_of(20 + n), 5, name=f"i{n}", execution=f"i{n}")))
        refs = await source.export_kv()
        assert refs
        asked = [ask(prompt_of(40 + n), 9, name=f"r{n}", execution=f"e{n}") for n in range(6)]
        made = await asyncio.gather(*(hear(source.submit(one)) for one in asked))
        for one, heard in zip(asked, made, strict=True):
            assert heard.ids == kind.subject.greedy(one.prompt_ids, 9, weights_seed=0)
        await nothing_left(source)

    play(scene, kind, 1, kv_handoff_idle=True, kv_lease_s=0.5)


def test_an_imported_prefix_gives_way_to_requests(kind: Kind) -> None:
    """Imports are a cache: they never keep a request from running."""

    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        for n in range(8):
            await hear(source.submit(ask(prompt_of(20 + n), 5, name=f"i{n}", execution=f"i{n}")))
        refs = await source.export_kv()
        for ref in refs:
            await destination.import_kv(ref)
        asked = [ask(prompt_of(40 + n), 9, name=f"r{n}", execution=f"e{n}") for n in range(12)]
        made = await asyncio.gather(*(hear(destination.submit(one)) for one in asked))
        assert [len(one.ids) for one in made] == [9] * 12
        for ref in refs:
            assert await source.release_kv(ref.ref) is KVRelease.RELEASED
        for engine in engines:
            await nothing_left(engine)

    play(scene, kind, 2, kv_handoff_idle=True)


def test_an_idle_prefix_of_another_version_or_with_other_ids_is_refused(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        await hear(source.submit(ask(prompt_of(50), 10)))
        (ref,) = await source.export_kv()
        shorter = forged(ref, ids=ref.ids[:-1])
        other = forged(ref, ids=[(one + 1) % 97 for one in ref.ids])
        for one in (shorter, other, forged(ref, ids=[]), forged(ref, model="another")):
            taken = await destination.import_kv(one)
            assert (taken.num_tokens, bool(taken.reason)) == (0, True)
        await publish(destination, kind, 1)
        taken = await destination.import_kv(ref)
        assert (taken.num_tokens, bool(taken.reason)) == (0, True)
        assert destination.stats().num_imported_tokens == 0
        await source.release_kv(ref.ref)
        await nothing_left(destination)

    play(scene, kind, 2, kv_handoff_idle=True)


def test_import_into_a_paused_or_released_engine_raises_nothing(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        await hear(source.submit(ask(prompt_of(50), 10)))
        (ref,) = await source.export_kv()
        await destination.pause()
        importing = asyncio.ensure_future(destination.import_kv(ref))
        await asyncio.sleep(0.01)
        await destination.resume()
        taken = await asyncio.wait_for(importing, 10)
        assert taken.num_tokens in (0, ref.num_tokens)
        await destination.pause()
        await destination.release()
        late = asyncio.ensure_future(destination.import_kv(ref))
        await asyncio.sleep(0.01)
        await destination.restore()
        await destination.resume()
        assert (await asyncio.wait_for(late, 10)).num_tokens in (0, ref.num_tokens)
        await source.release_kv(ref.ref)
        for engine in engines:
            await nothing_left(engine)

    play(scene, kind, 2, kv_handoff_idle=True)
