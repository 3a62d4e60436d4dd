"""No keys and values of another version are read: a publication drops every pin.

Checked by comparing logprobs with those of an oracle that never had a cache.
"""

import asyncio
from typing import Any

import msgspec
import pytest
from engine_under_test import prompt_of
from handoff_rig import (
    KINDS,
    LOGPROB_GAP,
    Heard,
    Kind,
    ask,
    cut,
    engine_of,
    hear,
    hear_some,
    kind_params,
    nothing_left,
    play,
    publish,
    rest_of,
)

from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.seams.kv import KVRelease


@pytest.fixture(params=kind_params())
def kind(request: Any) -> Kind:
    return KINDS[request.param]


def assert_fresh(kind: Kind, asked: GenerateRequest, made: Heard, *, version: int) -> None:
    """The logprobs are what a recompute of everything under `version` gives."""
    assert made.versions <= {version}
    expected = kind.subject.logprobs(asked, made.ids, weights_seed=version)
    assert made.logprobs == pytest.approx(expected, abs=LOGPROB_GAP)


def test_the_oracle_tells_two_versions_apart(kind: Kind) -> None:
    asked, ids = ask(prompt_of(30), 8, temperature=1.0), prompt_of(8)
    old, new = (kind.subject.logprobs(asked, ids, weights_seed=one) for one in (0, 1))
    assert min(abs(a - b) for a, b in zip(old, new, strict=True)) > 10 * LOGPROB_GAP


def test_a_publication_at_the_source_drops_its_pins(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 40, temperature=1.0, seed=4)
        first = await cut(source, asked, 5)
        await source.pause()
        await source.begin_update(1)
        assert source.stats().num_pinned == 0
        assert await source.release_kv(first.ref.ref) is KVRelease.DROPPED
        for name, tensor in kind.subject.weights(1).items():
            await source.push(name, tensor)
        await source.commit(1)
        await source.resume()
        again = rest_of(asked, first, kv=first.ref)
        rest = await hear(destination.submit(again))
        assert rest.taken is not None
        if kind.has_bytes:
            assert (rest.taken.num_tokens, bool(rest.taken.reason)) == (0, True)
        assert_fresh(kind, again, rest, version=0)
        back = msgspec.structs.replace(again, request_id="back")
        here = await hear(source.submit(back))
        assert here.taken is not None
        assert here.taken.num_tokens == 0
        assert_fresh(kind, again, here, version=1)
        await nothing_left(source)

    play(scene, kind, 2)


def test_after_a_publication_at_both_the_old_prefix_is_refused(kind: Kind) -> None:
    """Also when the version of the reference is forged to look new."""

    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 40, temperature=1.0, seed=4)
        first = await cut(source, asked, 5)
        for engine in engines:
            await publish(engine, kind, 1)
        again = rest_of(asked, first, kv=first.ref)
        rest = await hear(destination.submit(again))
        assert rest.taken is not None
        assert (rest.taken.num_tokens, bool(rest.taken.reason)) == (0, True)
        assert_fresh(kind, again, rest, version=1)
        if kind.has_bytes:
            newer = msgspec.structs.replace(first.ref, version=1)
            forged = msgspec.structs.replace(again, request_id="forged", kv=newer)
            made = await hear(destination.submit(forged))
            assert_fresh(kind, again, made, version=1)

    play(scene, kind, 2)


def test_what_was_imported_is_forgotten_by_a_publication_at_the_destination(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60, temperature=1.0, seed=4)
        first = await cut(source, asked, 5)
        again = rest_of(asked, first, kv=first.ref)
        stream = destination.submit(again)
        part = await hear_some(stream, 3)
        assert part.taken is not None
        assert part.taken.num_tokens > 0
        await destination.freeze_all(keeps_kv=False)
        part = await hear(stream, part)
        assert part.end is not None
        assert (part.end.finish, part.end.kv) == (Finish.FROZEN, None)
        await publish(destination, kind, 1)
        last = rest_of(again, part, kv=None)
        assert_fresh(kind, last, await hear(destination.submit(last)), version=1)

    play(scene, kind, 2)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_publication_while_a_prefix_is_read_mixes_nothing(
    kind: Kind, side: str, delay_s: float
) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(90), 30, temperature=1.0, seed=4)
        first = await cut(source, asked, 2)
        again = rest_of(asked, first, kv=first.ref)
        reading = asyncio.ensure_future(hear(destination.submit(again)))
        await asyncio.sleep(delay_s)
        if side == "source":
            await publish(source, kind, 1)
            made = await reading
            assert_fresh(kind, again, made, version=0)
            return
        await destination.freeze_all(keeps_kv=False)
        made = await reading
        assert made.finish in (Finish.FROZEN, Finish.LENGTH)
        assert made.end is not None
        assert made.end.kv is None
        if made.ids:
            assert_fresh(kind, again, made, version=0)
        await publish(destination, kind, 1)
        last = rest_of(again, made, kv=first.ref)
        if last.max_new_tokens:
            rest = await hear(destination.submit(last))
            assert_fresh(kind, last, rest, version=1)
            assert rest.taken is not None
            assert rest.taken.num_tokens == 0
        await source.release_kv(first.ref.ref)
        await nothing_left(source)

    play(scene, kind, 2)


def test_a_publication_pins_nothing(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        (source,) = engines
        asked = [ask(prompt_of(20 + n), 60, name=f"r{n}", execution=f"e{n}") for n in range(4)]
        streams = [source.submit(one) for one in asked]
        begun = [await hear_some(one, 2) for one in streams]
        await source.freeze_all(keeps_kv=False)
        ends = [await hear(*pair) for pair in zip(streams, begun, strict=True)]
        assert [one.end.kv for one in ends if one.end] == [None] * 4
        assert source.stats().num_pinned == 0
        await nothing_left(source)

    play(scene, kind, 1, kv_handoff_idle=True)


def test_a_pin_of_the_new_version_is_read(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        for engine in engines:
            await publish(engine, kind, 1)
        source, destination = engines
        asked = ask(prompt_of(30), 40, temperature=1.0, seed=4)
        first = await cut(source, asked, 5)
        assert first.ref.version == 1
        again = rest_of(asked, first, kv=first.ref)
        rest = await hear(destination.submit(again))
        assert rest.taken is not None
        assert rest.taken.num_tokens == first.ref.num_tokens
        assert_fresh(kind, again, rest, version=1)

    play(scene, kind, 2)


def test_pins_can_not_be_made_between_the_begin_and_the_commit_of_an_update(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        async with engine_of(kind, name="idle", kv_handoff_idle=True) as source:
            await hear(source.submit(ask(prompt_of(30), 5)))
            await source.pause()
            await source.begin_update(1)
            assert await source.export_kv() == []
            for name, tensor in kind.subject.weights(1).items():
                await source.push(name, tensor)
            await source.commit(1)
            assert await source.export_kv() == []
            await source.resume()

    play(scene, kind, 1)
