"""A prefix that is offered to an engine with no free place, and one that cannot be kept."""

import asyncio
from typing import Any

import pytest
from engine_under_test import prompt_of
from handoff_rig import (
    KINDS,
    MAX_RUNNING,
    TORCH,
    Kind,
    ask,
    cut,
    hear,
    hear_some,
    kind_params,
    play,
    rest_of,
)

from opengyre.engines.desk import NO_PLACE
from opengyre.engines.torch_engine.kv_pool import KVPool
from opengyre.seams.engine import Finish

SOON_S = 5.0
of_torch = pytest.mark.parametrize("kind", kind_params(*(one.name for one in TORCH)), indirect=True)


@pytest.fixture(params=kind_params())
def kind(request: Any) -> Kind:
    return KINDS[request.param]


def test_an_engine_without_a_free_place_declines_at_once_and_gives_the_same(kind: Kind) -> None:
    """Its source does not wait until a place is free: the request does."""

    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 30)
        whole = await hear(alone.submit(asked))
        others = [ask(prompt_of(4), 100, name=f"o{n}", execution=f"o{n}") for n in range(4)]
        assert len(others) == MAX_RUNNING
        running = [destination.submit(one) for one in others]
        for stream in running:
            await hear_some(stream, 1)
        await destination.pause()
        first = await cut(source, asked, 5)
        stream = destination.submit(rest_of(asked, first, kv=first.ref))
        declined = await asyncio.wait_for(anext(stream), SOON_S)
        assert declined.taken is not None
        assert (declined.taken.ref, declined.taken.num_tokens) == (first.ref.ref, 0)
        assert declined.taken.reason == NO_PLACE
        await source.release_kv(first.ref.ref)
        for one in others:
            await destination.cancel(one.request_id)
        await destination.resume()
        rest = await hear(stream)
        assert first.ids + rest.ids == whole.ids

    play(scene, kind, 3)


def test_an_idle_prefix_is_declined_where_no_place_is_free(kind: Kind) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination = engines
        await hear(source.submit(ask(prompt_of(40), 5)))
        (ref,) = await source.export_kv()
        others = [ask(prompt_of(4), 100, name=f"o{n}", execution=f"o{n}") for n in range(4)]
        running = [destination.submit(one) for one in others]
        await destination.pause()
        taken = await asyncio.wait_for(destination.import_kv(ref), SOON_S)
        assert (taken.ref, taken.num_tokens, taken.reason) == (ref.ref, 0, NO_PLACE)
        await source.release_kv(ref.ref)
        for one in others:
            await destination.cancel(one.request_id)
        for stream in running:
            await hear(stream)

    play(scene, kind, 2, kv_handoff_idle=True)


@of_torch
@pytest.mark.parametrize("error", [OSError("no file is left"), RuntimeError("no thread is left")])
def test_what_cannot_be_kept_is_frozen_all_the_same(
    kind: Kind, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(engines: list[Any]) -> None:
        source, destination, alone = engines
        asked = ask(prompt_of(40), 30)
        whole = await hear(alone.submit(asked))
        stream = source.submit(asked)
        first = await hear_some(stream, 5)

        def fail(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(KVPool, "pin", fail)
            await source.freeze(asked.request_id, keeps_kv=True)
        first = await hear(stream, first)
        assert (first.finish, first.end.kv if first.end else None) == (Finish.FROZEN, None)
        assert source.stats().num_pinned == source.stats().num_running == 0
        rest = await hear(destination.submit(rest_of(asked, first, kv=None)))
        assert first.ids + rest.ids == whole.ids

    play(scene, kind, 3)
