"""One suite for every rollout engine, directly and through the link."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_under_test import (
    CONTEXT_TOKENS,
    MAX_RUNNING,
    MAX_WAITING,
    SUBJECTS,
    Bench,
    all_chunks,
    open_bench,
    prompt_of,
    queued_chunks,
    request,
)

from opengyre.seams.engine import Chunk, Finish
from opengyre.seams.errors import BoundaryError
from opengyre.transport.chunk_stream import collect

Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@pytest.fixture(params=[False, True], ids=["direct", "linked"])
def is_linked(request: Any) -> bool:
    return bool(request.param)


@pytest.fixture(params=list(SUBJECTS))
def run(request: Any, tmp_path: Path, is_linked: bool) -> Run:
    def run_on_bench(play: Callable[[Bench], Awaitable[None]]) -> None:
        async def main() -> None:
            subject = SUBJECTS[request.param]
            async with open_bench(subject, tmp_path, is_linked=is_linked) as bench:
                await play(bench)

        asyncio.run(main())

    return run_on_bench


def test_greedy_ids_equal_the_reference(run: Run) -> None:
    async def play(bench: Bench) -> None:
        for number, length in enumerate((1, 7, 40)):
            prompt = prompt_of(length)
            made = await collect(bench.front.submit(request(number, prompt, 12, temperature=0.0)))
            assert made.ids == bench.subject.greedy(prompt, 12, weights_seed=0)

    run(play)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_of_the_sampled_distribution(run: Run, temperature: float) -> None:
    async def play(bench: Bench) -> None:
        asked = request(1, prompt_of(9), 16, temperature=temperature, seed=5)
        made = await collect(bench.front.submit(asked))
        expected = bench.subject.logprobs(asked, made.ids, weights_seed=0)
        assert made.logprobs == pytest.approx(expected, abs=1e-4)

    run(play)


def test_requests_in_one_batch_get_what_they_get_alone(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = [
            request(number, prompt_of(3 + 5 * number), 6 + number, seed=number)
            for number in range(MAX_RUNNING + 3)
        ]
        together = await asyncio.gather(*(collect(bench.front.submit(one)) for one in asked))
        for one, made in zip(asked, together, strict=True):
            assert made.ids == (await collect(bench.front.submit(one))).ids

    run(play)


def test_a_stream_ends_in_exactly_one_terminal_chunk_without_tokens(run: Run) -> None:
    async def play(bench: Bench) -> None:
        chunks = await all_chunks(bench.front.submit(request(1, prompt_of(5), 8)))
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish is Finish.LENGTH
        assert chunks[-1].ids == []
        assert all(len(chunk.ids) == len(chunk.logprobs) > 0 for chunk in chunks[:-1])
        assert sum(len(chunk.ids) for chunk in chunks) == 8

    run(play)


def test_a_stop_id_ends_the_stream_and_is_in_it(run: Run) -> None:
    async def play(bench: Bench) -> None:
        prompt = prompt_of(6)
        whole = bench.subject.greedy(prompt, 10, weights_seed=0)
        stop = whole[4]
        asked = request(1, prompt, 10, temperature=0.0, stop_ids=[stop])
        made = await collect(bench.front.submit(asked))
        assert made.finish is Finish.STOP
        assert made.ids == whole[: whole.index(stop) + 1]

    run(play)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cut_at_every_token_continues_identically(run: Run, temperature: float) -> None:
    async def play(bench: Bench) -> None:
        prompt = prompt_of(8)
        settings: dict[str, Any] = {"temperature": temperature, "seed": 11}
        whole = await collect(bench.front.submit(request(0, prompt, 12, **settings)))
        assert len(whole.ids) == 12
        for k in range(1, 12):
            first = await collect(bench.front.submit(request(2 * k, prompt, k, **settings)))
            again = request(2 * k + 1, prompt + first.ids, 12 - k, **settings)
            rest = await collect(bench.front.submit(again))
            assert first.ids + rest.ids == whole.ids, f"cut after {k}"
            assert first.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)

    run(play)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_freeze_at_any_moment_continues_identically(run: Run, temperature: float) -> None:
    async def play(bench: Bench) -> None:
        prompt = prompt_of(8)
        settings: dict[str, Any] = {"temperature": temperature, "seed": 3}
        whole = await collect(bench.front.submit(request(0, prompt, 60, **settings)))
        num_frozen = 0
        for k in range(0, 12, 2):
            asked = request(2 * k + 1, prompt, 60, **settings)
            first = await _frozen_after(bench, asked, k)
            num_frozen += first.finish is Finish.FROZEN
            num_left = 60 - len(first.ids)
            again = request(2 * k + 2, prompt + first.ids, num_left, **settings)
            rest = await collect(bench.front.submit(again))
            assert first.ids + rest.ids == whole.ids
        assert num_frozen >= 3

    run(play)


async def _frozen_after(bench: Bench, asked: Any, num_tokens: int) -> Chunk:
    """What came until the freeze at `num_tokens` was acknowledged; nothing may come after it."""
    chunks = bench.front.submit(asked)
    ids: list[int] = []
    if num_tokens == 0:
        await bench.front.freeze(asked.request_id)
    async for chunk in chunks:
        ids += chunk.ids
        if chunk.finish is None and len(ids) >= num_tokens:
            await bench.front.freeze(asked.request_id)
            rest = await queued_chunks(chunks)
            num_generated = (await bench.stats()).num_generated_tokens
            await asyncio.sleep(0.01)
            assert (await bench.stats()).num_generated_tokens == num_generated
            ids += [one for late in rest for one in late.ids]
            return msgspec.structs.replace(rest[-1], ids=ids)
    return msgspec.structs.replace(chunk, ids=ids)


def test_freeze_and_cancel_are_idempotent_and_take_unknown_ids(run: Run) -> None:
    async def play(bench: Bench) -> None:
        chunks = bench.front.submit(request(1, prompt_of(4), 60))
        await bench.front.freeze("r1")
        await bench.front.freeze("r1")
        await bench.front.cancel("r1")
        await bench.front.freeze("nobody")
        await bench.front.cancel("nobody")
        assert [one.finish for one in await all_chunks(chunks) if one.finish] == [Finish.FROZEN]

    run(play)


def test_cancel_ends_a_running_and_a_waiting_request_with_one_terminal_chunk(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = [request(number, prompt_of(4), 80) for number in range(MAX_RUNNING + 1)]
        streams = [bench.front.submit(one) for one in asked]
        await anext(streams[0])
        await bench.front.cancel("r0")
        await bench.front.cancel(f"r{MAX_RUNNING}")
        for stream in (streams[0], streams[-1]):
            finishes = [one.finish for one in await queued_chunks(stream) if one.finish]
            assert finishes == [Finish.CANCELLED]
        await bench.front.freeze_all()

    run(play)


def test_freeze_all_ends_what_runs_and_what_waits(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = [request(number, prompt_of(4), 80) for number in range(MAX_RUNNING + 3)]
        streams = [bench.front.submit(one) for one in asked]
        await anext(streams[0])
        await bench.front.freeze_all()
        made = [await queued_chunks(one) for one in streams]
        assert [one[-1].finish for one in made] == [Finish.FROZEN] * len(asked)
        stats = await bench.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)

    run(play)


def test_the_waiting_queue_is_bounded_and_says_so(run: Run) -> None:
    async def play(bench: Bench) -> None:
        await bench.engine.pause()
        asked = [request(number, prompt_of(4), 4) for number in range(MAX_WAITING + 1)]
        streams = [bench.front.submit(one) for one in asked]
        refused = await collect(streams[-1])
        assert refused.finish is Finish.ERROR
        assert "full" in refused.reason
        await bench.engine.resume()
        made = [await collect(one) for one in streams[:-1]]
        assert {one.finish for one in made} == {Finish.LENGTH}

    run(play)


def test_what_cannot_run_is_refused_with_a_reason(run: Run) -> None:
    async def play(bench: Bench) -> None:
        too_long = await collect(bench.front.submit(request(1, prompt_of(CONTEXT_TOKENS + 1), 4)))
        assert too_long.finish is Finish.REFUSED
        assert str(CONTEXT_TOKENS) in too_long.reason
        empty = await collect(bench.front.submit(request(2, [], 4)))
        assert empty.finish is Finish.REFUSED
        first = bench.front.submit(request(3, prompt_of(4), 60))
        twin = await collect(bench.front.submit(request(3, prompt_of(4), 60)))
        assert twin.finish is Finish.ERROR
        await bench.front.cancel("r3")
        assert (await collect(first)).finish is Finish.CANCELLED

    run(play)


def test_a_full_context_ends_by_length(run: Run) -> None:
    async def play(bench: Bench) -> None:
        made = await collect(bench.front.submit(request(1, prompt_of(CONTEXT_TOKENS - 3), 50)))
        assert (made.finish, len(made.ids)) == (Finish.LENGTH, 3)
        full = await collect(bench.front.submit(request(2, prompt_of(CONTEXT_TOKENS), 50)))
        assert (full.finish, len(full.ids)) == (Finish.LENGTH, 0)

    run(play)


def test_a_pause_stops_tokens_and_changes_none(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = request(1, prompt_of(5), 30, seed=2)
        whole = await collect(bench.front.submit(asked))
        chunks = bench.front.submit(asked)
        ids = (await anext(chunks)).ids
        await bench.engine.pause()
        num_generated = (await bench.stats()).num_generated_tokens
        await asyncio.sleep(0.02)
        assert (await bench.stats()).num_generated_tokens == num_generated
        await bench.engine.resume()
        assert ids + (await collect(chunks)).ids == whole.ids

    run(play)


def test_two_updates_each_serve_the_new_weights_for_a_prompt_cached_before(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = request(1, prompt_of(30), 10, seed=4)
        await collect(bench.front.submit(asked))
        for version in (1, 2):
            await bench.update(version)
            assert (await bench.stats()).version == version
            chunks = await all_chunks(bench.front.submit(asked))
            assert {chunk.policy_version for chunk in chunks} == {version}
            ids = [one for chunk in chunks for one in chunk.ids]
            logprobs = [one for chunk in chunks for one in chunk.logprobs]
            expected = bench.subject.logprobs(asked, ids, weights_seed=version)
            assert logprobs == pytest.approx(expected, abs=1e-4)
            old = bench.subject.logprobs(asked, ids, weights_seed=version - 1)
            assert np.abs(np.array(old) - np.array(logprobs)).max() > 1e-2

    run(play)


def test_each_span_of_a_request_across_an_update_carries_the_version_that_sampled_it(
    run: Run,
) -> None:
    async def play(bench: Bench) -> None:
        asked = request(1, prompt_of(12), 40, seed=9)
        chunks = bench.front.submit(asked)
        first = await anext(chunks)
        await bench.update(1)
        spans = [first, *[one async for one in chunks if one.ids]]
        ids = [one for chunk in spans for one in chunk.ids]
        logprobs = [one for chunk in spans for one in chunk.logprobs]
        versions = [chunk.policy_version for chunk in spans for _ in chunk.ids]
        assert set(versions) == {0, 1}
        assert versions == sorted(versions)
        by_version = [bench.subject.logprobs(asked, ids, weights_seed=seed) for seed in (0, 1)]
        expected = [by_version[version][place] for place, version in enumerate(versions)]
        assert logprobs == pytest.approx(expected, abs=1e-4)

    run(play)


def test_a_failed_push_leaves_the_engine_unroutable_until_a_full_load(run: Run) -> None:
    async def play(bench: Bench) -> None:
        engine = bench.engine
        await engine.pause()
        await engine.begin_update(1)
        name, tensor = next(iter(bench.subject.weights(1).items()))
        with pytest.raises(BoundaryError, match="not finite"):
            await engine.push(name, np.full(tuple(tensor.shape), np.nan, np.float32))
        with pytest.raises(BoundaryError):
            await engine.commit(1)
        with pytest.raises(BoundaryError):
            await engine.resume()
        refused = await collect(bench.front.submit(request(1, prompt_of(4), 4)))
        assert refused.finish is Finish.ERROR
        assert "unroutable" in refused.reason
        await bench.update(1)
        made = await collect(bench.front.submit(request(2, prompt_of(4), 4)))
        assert (made.finish, made.policy_version) == (Finish.LENGTH, 1)

    run(play)


def test_an_update_with_a_weight_missing_is_not_committed(run: Run) -> None:
    async def play(bench: Bench) -> None:
        engine = bench.engine
        await engine.pause()
        await engine.begin_update(1)
        for name, tensor in list(bench.subject.weights(1).items())[1:]:
            await engine.push(name, tensor)
        with pytest.raises(BoundaryError):
            await engine.commit(1)
        with pytest.raises(BoundaryError):
            await engine.resume()
        assert engine.stats().version == 0

    run(play)


def test_weights_change_only_while_paused(run: Run) -> None:
    async def play(bench: Bench) -> None:
        with pytest.raises(BoundaryError, match="paused"):
            await bench.engine.begin_update(1)
        name, tensor = next(iter(bench.subject.weights(1).items()))
        with pytest.raises(BoundaryError):
            await bench.engine.push(name, tensor)
        made = await collect(bench.front.submit(request(1, prompt_of(4), 4)))
        assert made.finish is Finish.LENGTH

    run(play)


def test_kv_memory_is_free_after_release_and_back_after_restore_twice(run: Run) -> None:
    async def play(bench: Bench) -> None:
        asked = request(1, prompt_of(10), 8, seed=1)
        whole = await collect(bench.front.submit(asked))
        for _ in range(2):
            await bench.engine.release()
            assert bench.engine.stats().kv_used_bytes == 0
            with pytest.raises(BoundaryError, match="released"):
                await bench.engine.resume()
            await bench.engine.restore()
            await bench.engine.resume()
            assert (await collect(bench.front.submit(asked))).ids == whole.ids

    run(play)


def test_release_refuses_while_a_request_runs(run: Run) -> None:
    async def play(bench: Bench) -> None:
        chunks = bench.front.submit(request(1, prompt_of(4), 90))
        await anext(chunks)
        with pytest.raises(BoundaryError, match="freeze"):
            await bench.engine.release()
        await bench.front.freeze_all()
        await bench.engine.release()

    run(play)


def test_a_reader_that_stops_cancels_its_request(run: Run) -> None:
    async def play(bench: Bench) -> None:
        async for chunk in bench.front.submit(request(1, prompt_of(4), 10**6)):
            assert chunk.ids
            break
        closed = bench.front.submit(request(2, prompt_of(4), 10**6))
        await anext(closed)
        await closed.aclose()
        await bench.until_idle()
        assert (await bench.stats()).num_generated_tokens < 2 * (CONTEXT_TOKENS - 4)

    run(play)


def test_the_caps_declare_the_logprob_mode_and_exact_resumption(run: Run) -> None:
    async def play(bench: Bench) -> None:
        caps = bench.front.caps()
        assert caps.logprob_mode == "processed"
        assert caps.is_resume_exact
        assert caps.context_tokens == CONTEXT_TOKENS

    run(play)
