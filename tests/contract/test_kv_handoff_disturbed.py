"""What happens in the middle of a long import leaves nothing behind, and the engine serves on.

Over TCP a relay holds the bytes half way; by shared memory a big model makes the read long.
"""

import asyncio
import functools
from typing import Any

import pytest
import torch
from engine_under_test import prompt_of
from handoff_rig import (
    KINDS,
    LOGPROB_GAP,
    Kind,
    ask,
    cut,
    hear,
    kind_params,
    nothing_left,
    play,
    publish,
    rest_of,
    until,
)
from slow_relay import relay_of
from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.seams.engine import Finish
from opengyre.seams.kv import KVRelease

HALF_BYTES = 3000
LONG_TOKENS = 1500
LONG = {"context_tokens": 2048, "num_kv_slots": 3, "max_running": 2, "step_tokens": 512}


@pytest.fixture(params=kind_params("qwen3-tcp", "llama-tcp"))
def tcp(request: Any) -> Kind:
    return KINDS[request.param]


@functools.cache
def big_model() -> Any:
    """16 KiB of keys and values for each token."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


async def assert_serves_all_slots(engine: Any, kind: Kind) -> None:
    """As many at once as ever, each with the right tokens."""
    asked = [ask(prompt_of(30 + n), 8, name=f"s{n}", execution=f"s{n}") for n in range(8)]
    made = await asyncio.gather(*(hear(engine.submit(one)) for one in asked))
    for one, heard in zip(asked, made, strict=True):
        assert heard.ids == kind.subject.greedy(one.prompt_ids, 8, weights_seed=0)


@pytest.mark.parametrize("how", ["freeze", "cancel", "freeze_all", "abandon"])
def test_a_request_that_ends_inside_its_import_leaves_nothing(tcp: Kind, how: str) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(40), 60)
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (relay, ref):
            rest = rest_of(asked, first, kv=ref)
            stream = destination.submit(rest)
            await asyncio.wait_for(relay.held.wait(), 10)
            async with asyncio.timeout(10):
                if how == "freeze":
                    await destination.freeze(rest.request_id, keeps_kv=True)
                elif how == "cancel":
                    await destination.cancel(rest.request_id)
                elif how == "freeze_all":
                    await destination.freeze_all(keeps_kv=False)
                else:
                    await stream.aclose()
            if how != "abandon":
                made = await asyncio.wait_for(hear(stream), 10)
                wanted = Finish.CANCELLED if how == "cancel" else Finish.FROZEN
                assert (made.finish, made.ids) == (wanted, [])
            await asyncio.wait_for(relay.reader_gone.wait(), 5)
            await until(lambda: not destination.stats().num_running, what="none running")
            await assert_serves_all_slots(destination, tcp)
        assert destination.stats().num_pinned == 0
        await nothing_left(destination)
        assert source.stats().num_pinned == 1
        assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
        await nothing_left(source)

    play(scene, tcp, 2)


def test_others_run_while_one_reads(tcp: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 60)
        whole = await hear(alone.submit(asked))
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (relay, ref):
            reading = asyncio.ensure_future(hear(destination.submit(rest_of(asked, first, kv=ref))))
            await asyncio.wait_for(relay.held.wait(), 10)
            await asyncio.wait_for(assert_serves_all_slots(destination, tcp), 10)
            assert not reading.done()
            relay.let_go()
            rest = await asyncio.wait_for(reading, 10)
        assert first.ids + rest.ids == whole.ids
        assert rest.taken is not None
        assert rest.taken.num_tokens == ref.num_tokens

    play(scene, tcp, 3)


def test_a_pause_inside_an_import_returns_and_after_it_the_request_goes_on(tcp: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 60)
        whole = await hear(alone.submit(asked))
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (relay, ref):
            reading = asyncio.ensure_future(hear(destination.submit(rest_of(asked, first, kv=ref))))
            await asyncio.wait_for(relay.held.wait(), 10)
            await asyncio.wait_for(destination.pause(), 10)
            relay.let_go()
            await asyncio.sleep(0.05)
            assert not reading.done()
            await destination.resume()
            rest = await asyncio.wait_for(reading, 10)
        assert first.ids + rest.ids == whole.ids
        await nothing_left(destination)

    play(scene, tcp, 3)


@pytest.mark.parametrize("how", ["cut", "release", "publication", "released and pinned anew"])
def test_a_source_that_ends_the_pin_inside_a_read_gives_none_of_it(how: str) -> None:
    """The prefix is far longer than what the network holds of it."""
    kind = KINDS["llama-tcp"]

    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(LONG_TOKENS), 20, temperature=1.0, seed=8)
        whole = await hear(alone.submit(asked))
        first = await cut(source, asked, 2)
        async with relay_of(first.ref, pass_bytes=400_000) as (relay, ref):
            reading = asyncio.ensure_future(hear(destination.submit(rest_of(asked, first, kv=ref))))
            await asyncio.wait_for(relay.held.wait(), 10)
            if how == "cut":
                await relay.cut()
            elif how == "publication":
                await source.pause()
                await source.begin_update(1)
            else:
                await source.release_kv(ref.ref)
            if how == "released and pinned anew":
                others = [ask(prompt_of(1300, seed=n), 20, name=f"other{n}") for n in range(3)]
                for other in others:
                    await cut(source, other, 2)
            relay.let_go()
            rest = await asyncio.wait_for(reading, 30)
        assert rest.taken is not None
        assert (rest.taken.num_tokens, bool(rest.taken.reason)) == (0, True)
        assert first.ids + rest.ids == whole.ids
        assert first.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=LOGPROB_GAP)
        await nothing_left(destination)

    play(scene, kind, 3, model=big_model(), **LONG)


@pytest.mark.parametrize("how", ["release", "publication"])
def test_a_pin_that_ends_while_its_bytes_travel_gives_right_tokens(tcp: Kind, how: str) -> None:
    """All of a short prefix may be on its way already: what was read is of the old version."""

    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 60, temperature=1.0, seed=8)
        whole = await hear(alone.submit(asked))
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (relay, ref):
            reading = asyncio.ensure_future(hear(destination.submit(rest_of(asked, first, kv=ref))))
            await asyncio.wait_for(relay.held.wait(), 10)
            if how == "publication":
                await publish(source, tcp, 1)
            else:
                await source.release_kv(ref.ref)
            await assert_busy(source)
            relay.let_go()
            rest = await asyncio.wait_for(reading, 30)
        assert first.ids + rest.ids == whole.ids
        assert first.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=LOGPROB_GAP)
        await nothing_left(destination)

    play(scene, tcp, 3)


async def assert_busy(engine: Any) -> None:
    """Every slot of it is written anew."""
    asked = [ask(prompt_of(60 + n), 8, name=f"b{n}", execution=f"b{n}") for n in range(8)]
    made = await asyncio.gather(*(hear(engine.submit(one)) for one in asked))
    assert [len(one.ids) for one in made] == [8] * 8


def test_a_publication_at_the_destination_inside_an_import(tcp: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(40), 40, temperature=1.0, seed=8)
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (relay, ref):
            rest = rest_of(asked, first, kv=ref)
            reading = asyncio.ensure_future(hear(destination.submit(rest)))
            await asyncio.wait_for(relay.held.wait(), 10)
            async with asyncio.timeout(10):
                await destination.freeze_all(keeps_kv=False)
                assert (await reading).ids == []
                await publish(destination, tcp, 1)
            again = rest_of(asked, first, kv=None)
            renewed = asyncio.ensure_future(hear(destination.submit(again)))
            relay.let_go()
            made = await asyncio.wait_for(renewed, 10)
        expected = tcp.subject.logprobs(again, made.ids, weights_seed=1)
        assert made.logprobs == pytest.approx(expected, abs=LOGPROB_GAP)
        await nothing_left(destination)

    play(scene, tcp, 2)


def test_a_source_that_answers_no_more_is_not_waited_for_beyond_the_lease(tcp: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 60)
        whole = await hear(alone.submit(asked))
        first = await cut(source, asked, 5)
        async with relay_of(first.ref, pass_bytes=HALF_BYTES) as (_, ref):
            rest = await asyncio.wait_for(
                hear(destination.submit(rest_of(asked, first, kv=ref))), 20
            )
        assert first.ids + rest.ids == whole.ids
        assert rest.taken is not None
        assert rest.taken.num_tokens == 0
        await nothing_left(source)
        await nothing_left(destination)

    play(scene, tcp, 3, kv_lease_s=0.5)


@pytest.mark.parametrize("plane", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["freeze", "cancel", "pause", "release"])
def test_a_long_import_is_disturbed_at_several_moments(plane: str, how: str) -> None:
    kind = KINDS[f"llama-{plane}"]

    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        for number, delay_s in enumerate((0.0, 0.002, 0.006, 0.015)):
            asked = ask(prompt_of(LONG_TOKENS, seed=number), 30, name=f"r{number}")
            first = await cut(source, asked, 2)
            rest = rest_of(asked, first, kv=first.ref)
            reading = asyncio.ensure_future(hear(destination.submit(rest)))
            await asyncio.sleep(delay_s)
            async with asyncio.timeout(20):
                if how == "pause":
                    await destination.pause()
                    await asyncio.sleep(0.02)
                    await destination.resume()
                elif how == "release":
                    await source.release_kv(first.ref.ref)
                    await source.cancel("none")
                    await hear(source.submit(ask(prompt_of(1400, seed=50 + number), 1, name="w")))
                elif how == "freeze":
                    await destination.freeze(rest.request_id)
                else:
                    await destination.cancel(rest.request_id)
                made = await reading
            if how in ("pause", "release"):
                again = rest_of(asked, first, kv=None)
                expected = await hear(source.submit(again))
                assert made.ids == expected.ids
                assert made.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_GAP)
            await source.release_kv(first.ref.ref)
        await until(lambda: not destination.stats().num_running, what="none running")
        await nothing_left(destination)
        await nothing_left(source)

    play(scene, kind, 2, model=big_model(), **LONG)
