"""A pin's life at its source: who is pinned, how often, and what waits for its end."""

import asyncio
from typing import Any

import pytest
from engine_under_test import prompt_of
from handoff_rig import (
    KINDS,
    MAX_RUNNING,
    Kind,
    ask,
    cut,
    hear,
    hear_some,
    kind_params,
    nothing_left,
    play,
    rest_of,
)

from opengyre.seams.engine import Finish
from opengyre.seams.kv import KVRelease


@pytest.fixture(params=kind_params())
def kind(request: Any) -> Kind:
    return KINDS[request.param]


def test_a_second_freeze_and_a_late_cancel_change_nothing(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        first = await cut(source, asked, 5)
        await source.freeze(asked.request_id, keeps_kv=True)
        await source.freeze_all(keeps_kv=True)
        await source.cancel(asked.request_id)
        assert source.stats().num_pinned == 1
        rest = await hear(destination.submit(rest_of(asked, first, kv=first.ref)))
        assert rest.taken is not None
        assert rest.taken.num_tokens == first.ref.num_tokens
        assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
        await nothing_left(source)

    play(scene, kind, 2)


def test_a_cancel_pins_nothing_and_a_request_that_waits_has_nothing_to_pin(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        asked = [
            ask(prompt_of(20 + n), 80, name=f"r{n}", execution=f"e{n}")
            for n in range(MAX_RUNNING + 2)
        ]
        streams = [source.submit(one) for one in asked]
        begun = [await hear_some(one, 1) for one in streams[:MAX_RUNNING]]
        await source.cancel("r0")
        ended = await hear(streams[0], begun[0])
        assert ended.finish is Finish.CANCELLED
        assert source.stats().num_pinned == 0
        await source.freeze_all(keeps_kv=True)
        rests = [await hear(one) for one in streams[MAX_RUNNING:]]
        assert {one.finish for one in rests} == {Finish.FROZEN}
        assert rests[-1].end is not None
        assert (rests[-1].ids, rests[-1].end.kv) == ([], None)
        assert MAX_RUNNING - 1 <= source.stats().num_pinned <= MAX_RUNNING
        firsts = [await hear(*pair) for pair in zip(streams[1:], begun[1:], strict=False)]
        for one in [*firsts, rests[0]]:
            if one.end is not None and one.end.kv is not None:
                assert await source.release_kv(one.ref.ref) is KVRelease.RELEASED
        await nothing_left(source)

    play(scene, kind, 1, tokens_per_s=200.0)


def test_one_prefix_is_read_by_several_and_only_its_release_ends_it(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, *others = engines
        asked = ask(prompt_of(30), 60, temperature=1.0, seed=1)
        first = await cut(source, asked, 5)
        rest = rest_of(asked, first, kv=first.ref)
        made = await asyncio.gather(*(hear(one.submit(rest)) for one in others))
        assert made[0].ids == made[1].ids
        for one in made:
            assert one.taken is not None
            assert one.taken.num_tokens == first.ref.num_tokens
        assert source.stats().num_pinned == 1
        assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
        await nothing_left(source)

    play(scene, kind, 3)


def test_the_memory_is_freed_when_the_last_pin_ends_and_no_sooner(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        asked = [ask(prompt_of(30 + n), 60, name=f"r{n}", execution=f"e{n}") for n in range(2)]
        refs = [(await cut(source, one, 3)).ref.ref for one in asked]
        await source.pause()
        releasing = asyncio.ensure_future(source.release())
        for ref in refs:
            await asyncio.sleep(0.02)
            assert not releasing.done()
            assert source.stats().kv_used_bytes > 0
            assert await source.release_kv(ref) is KVRelease.RELEASED
        await asyncio.wait_for(releasing, 5)
        stats = source.stats()
        assert (stats.kv_used_bytes, stats.kv_capacity_bytes, stats.num_pinned) == (0, 0, 0)
        await source.restore()
        await source.resume()
        assert source.stats().kv_capacity_bytes > 0 or not kind.has_bytes
        await nothing_left(source)

    play(scene, kind, 1, kv_lease_s=30.0)


def test_a_release_nobody_helps_is_over_when_the_lease_is(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        first = await cut(source, ask(prompt_of(30), 60), 3)
        begun_s = asyncio.get_running_loop().time()
        await source.pause()
        await asyncio.wait_for(source.release(), 10)
        took_s = asyncio.get_running_loop().time() - begun_s
        assert took_s > first.ref.lease_s / 2
        assert await source.release_kv(first.ref.ref) is KVRelease.LEASE_ENDED
        await source.restore()
        await source.resume()

    play(scene, kind, 1, kv_lease_s=0.4)


def test_pins_never_keep_requests_waiting(kind: Kind) -> None:
    """With every slot pinned new requests run all the same, before the leases end."""

    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        firsts = []
        for batch in range(3):
            asked = [
                ask(prompt_of(20 + n, seed=batch), 60, name=f"b{batch}.{n}", execution=f"b{n}")
                for n in range(MAX_RUNNING)
            ]
            streams = [source.submit(one) for one in asked]
            begun = [await hear_some(one, 1) for one in streams]
            await source.freeze_all(keeps_kv=True)
            pairs = zip(streams, begun, strict=True)
            firsts += list(zip(asked, [await hear(*pair) for pair in pairs], strict=True))
        made = await asyncio.wait_for(hear(source.submit(ask(prompt_of(40), 5))), 10)
        assert made.ids == kind.subject.greedy(prompt_of(40), 5, weights_seed=0)
        for asked_one, first in firsts:
            kv = first.end.kv if first.end else None
            rest = await hear(destination.submit(rest_of(asked_one, first, kv=kv)))
            ids = first.ids + rest.ids
            assert ids == kind.subject.greedy(asked_one.prompt_ids, 60, weights_seed=0)
            if kv is not None:
                await source.release_kv(kv.ref)
        await nothing_left(source)

    play(scene, kind, 2, kv_lease_s=60.0)
