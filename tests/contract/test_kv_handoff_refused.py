"""What a destination does not read: another version, another model, another prompt, a forgery.

Each is computed instead, with the same tokens, and the reason is told.
"""

from typing import Any

import pytest
import torch
from engine_under_test import prompt_of, tiny_model
from handoff_rig import (
    KINDS,
    LOGPROB_GAP,
    TORCH,
    Kind,
    ask,
    cut,
    engine_of,
    forged,
    hear,
    kind_params,
    nothing_left,
    play,
    publish,
    rest_of,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.kv import KVRef, KVRelease

NONSENSE = "0" * 32


@pytest.fixture(params=kind_params())
def kind(request: Any) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=kind_params(*(one.name for one in TORCH)))
def torch_kind(request: Any) -> Kind:
    return KINDS[request.param]


def wider_model(family: str) -> Any:
    """Twice the KV heads of the tiny one."""
    sizes: dict[str, Any] = dict(tiny_model(family, is_tied=True, seed=0).config.to_dict())
    assert family == "qwen3"
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    chosen = {name: sizes[name] for name in (*kept, "num_attention_heads")}
    config = Qwen3Config(
        **chosen, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


async def assert_refused(destination: Any, asked: Any, first: Any, ref: KVRef) -> None:
    """`first` goes on at `destination` with `ref` just as it does there without one."""
    expected = await hear(destination.submit(rest_of(asked, first, kv=None)))
    await destination.pause()
    await destination.release()
    await destination.restore()
    await destination.resume()
    before = destination.stats()
    made = await hear(destination.submit(rest_of(asked, first, kv=ref)))
    assert made.taken is not None, "nothing was said about the reference"
    assert (made.taken.ref, made.taken.num_tokens, made.taken.num_bytes) == (ref.ref, 0, 0)
    assert made.taken.reason
    assert made.ids == expected.ids
    assert made.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_GAP)
    after = destination.stats()
    num_prompt = len(asked.prompt_ids) + len(first.ids)
    assert after.num_prefill_tokens - before.num_prefill_tokens == num_prompt
    assert after.num_imported_tokens == before.num_imported_tokens


def test_a_prefix_of_another_version_is_refused(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        await publish(destination, kind, 1)
        asked = ask(prompt_of(30), 40, temperature=1.0, seed=2)
        first = await cut(source, asked, 5)
        assert first.ref.version == 0
        await assert_refused(destination, asked, first, first.ref)
        await source.release_kv(first.ref.ref)
        await nothing_left(source)

    play(scene, kind, 2)


def test_a_prefix_of_another_architecture_with_the_same_sizes_is_refused(torch_kind: Kind) -> None:
    family = "llama" if torch_kind.family == "qwen3" else "qwen3"
    other = tiny_model(family, is_tied=True, seed=0)

    async def scene(engines: list[Any]) -> None:
        async with engine_of(torch_kind, name="other", model=other) as destination:
            asked = ask(prompt_of(30), 30)
            first = await cut(engines[0], asked, 5)
            assert first.ref.place.num_bytes > 0
            await assert_refused(destination, asked, first, first.ref)

    play(scene, torch_kind, 1)


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_prefix_of_a_model_with_other_sizes_or_another_type_is_refused(plane: str) -> None:
    kind = KINDS[f"qwen3-{plane}"]
    others = {
        "sizes": wider_model("qwen3"),
        "type": tiny_model("qwen3", is_tied=True, seed=0).to(torch.bfloat16),
    }

    async def scene(engines: list[Any]) -> None:
        for what, other in others.items():
            async with engine_of(kind, name=what, model=other) as destination:
                asked = ask(prompt_of(30), 20, name=what)
                first = await cut(engines[0], asked, 5)
                await assert_refused(destination, asked, first, first.ref)

    play(scene, kind, 1)


def test_engines_of_unlike_pools_read_each_other(torch_kind: Kind) -> None:
    """Context length, slots and running requests are an engine's own affair."""

    async def scene(engines: list[Any]) -> None:
        async with engine_of(
            torch_kind, name="small", context_tokens=101, num_kv_slots=3, max_running=2
        ) as small:
            for source, destination in ((engines[0], small), (small, engines[0])):
                asked = ask(prompt_of(30), 40, temperature=1.0, seed=2)
                whole = await hear(engines[1].submit(asked))
                first = await cut(source, asked, 5)
                rest = await hear(destination.submit(rest_of(asked, first, kv=first.ref)))
                assert first.ids + rest.ids == whole.ids
                assert rest.taken is not None
                assert rest.taken.num_tokens > 0
                await source.release_kv(first.ref.ref)

    play(scene, torch_kind, 2)


def test_a_prefix_of_another_prompt_is_refused(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        other = ask(prompt_of(30, seed=9), 60, name="r1", execution="e000002")
        first, unlike = await cut(source, asked, 5), await cut(source, other, 5)
        await assert_refused(destination, asked, first, unlike.ref)
        moved = forged(first.ref, digest=unlike.ref.digest)
        await assert_refused(destination, asked, first, moved)
        for one in (first, unlike):
            assert await source.release_kv(one.ref.ref) is KVRelease.RELEASED

    play(scene, kind, 2)


def test_a_reference_longer_than_its_prompt_or_without_tokens_is_refused(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        first = await cut(source, asked, 5)
        for num_tokens in (0, -1, 10_000, first.ref.num_tokens + len(first.ids) + 1):
            ref = forged(first.ref, num_tokens=num_tokens)
            await assert_refused(destination, asked, first, ref)

    play(scene, kind, 2)


FORGERIES: dict[str, dict[str, Any]] = {
    "key": {"key": NONSENSE},
    "empty key": {"key": ""},
    "address": {"address": "no such place"},
    "empty address": {"address": ""},
    "a file": {"address": "/etc/hostname"},
    "a path up": {"address": "../../../etc/hostname"},
    "a port nobody serves": {"address": "127.0.0.1:1"},
    "a huge port": {"address": "127.0.0.1:99999999"},
    "kind": {"kind": "carrier pigeon"},
    "kind without bytes": {"kind": "scripted"},
    "kind shm": {"kind": "shm", "address": "127.0.0.1:1"},
    "kind tcp": {"kind": "tcp", "address": "1:2:3"},
    "fewer ranges": {"num_ranges": 1},
    "no ranges": {"num_ranges": 0},
    "negative ranges": {"num_ranges": -4},
    "many ranges": {"num_ranges": 10**9},
    "short ranges": {"range_bytes": 32},
    "negative bytes": {"range_bytes": -32},
    "huge ranges": {"range_bytes": 2**50},
}


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_forged_place_is_refused(plane: str) -> None:
    kind = KINDS[f"qwen3-{plane}"]

    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 30)
        first = await cut(source, asked, 5)
        for what, fields in FORGERIES.items():
            try:
                await assert_refused(destination, asked, first, forged(first.ref, **fields))
            except Exception as error:
                error.add_note(f"forged: {what}")
                raise
        last = await hear(destination.submit(rest_of(asked, first, kv=first.ref)))
        assert last.taken is not None
        assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
        await nothing_left(source)
        await nothing_left(destination)

    play(scene, kind, 2)


def test_a_prefix_that_was_released_is_not_read(torch_kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        first = await cut(source, asked, 5)
        assert await source.release_kv(first.ref.ref) is KVRelease.RELEASED
        await assert_refused(destination, asked, first, first.ref)

    play(scene, torch_kind, 2)


def test_a_prefix_whose_lease_ended_is_not_read(torch_kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        first = await cut(source, asked, 5)
        await nothing_left(source)
        assert await source.release_kv(first.ref.ref) is KVRelease.LEASE_ENDED
        await assert_refused(destination, asked, first, first.ref)

    play(scene, torch_kind, 2, kv_lease_s=0.05)


def test_a_garbage_release_and_a_garbage_idle_prefix_change_nothing(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        asked = ask(prompt_of(30), 60)
        first = await cut(source, asked, 5)
        for ref in ("", "nonsense", first.ref.ref + "x"):
            assert await source.release_kv(ref) is KVRelease.UNKNOWN
        assert source.stats().num_pinned == 1
        bare = await destination.import_kv(first.ref)
        assert (bare.num_tokens, bool(bare.reason)) == (0, True)
        unlike = forged(first.ref, ids=prompt_of(first.ref.num_tokens, seed=4))
        other = await destination.import_kv(unlike)
        assert (other.num_tokens, bool(other.reason)) == (0, True)
        await nothing_left(destination)

    play(scene, kind, 2)
