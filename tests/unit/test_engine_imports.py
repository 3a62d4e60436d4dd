"""Prefixes that are read: when computing is the better choice, a part in each step, and what is
said of it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
import torch

from opengyre.engines.checksum import digest_of
from opengyre.engines.desk import Live
from opengyre.engines.torch_engine.imports import TRY_AGAIN_AFTER, Imports
from opengyre.engines.torch_engine.kv_pool import KVPool, KVShape
from opengyre.engines.torch_engine.slots import SlotTable
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.kv import KVRef, KVTaken

NUM_LAYERS = 3
IDS = list(range(40))
SHAPE = KVShape(num_layers=NUM_LAYERS, num_slots=2, context_tokens=64, num_kv_heads=2, head_dim=4)


def pool(plane: str = "shm") -> KVPool:
    return KVPool(SHAPE, dtype=torch.float32, device=torch.device("cpu"), plane=plane)


class Pair:
    """A source whose slot 1 holds the prefix of IDS, and what a destination does with it."""

    def __init__(self, mode: str) -> None:
        self.source, self.target = pool(), pool()
        for layer in range(NUM_LAYERS):
            self.source.layer(layer)[:, 1] = torch.randn(2, 64, 2, 4)
        self.pin = self.source.pin(1, 30)
        self.table = SlotTable(SHAPE.num_slots, SHAPE.context_tokens)
        self.imports = Imports(self.target, self.table, mode=mode, model="m")
        self.live = Live(
            GenerateRequest(
                request_id="r", execution="e", prompt_ids=IDS, max_new_tokens=5, kv=self.ref()
            )
        )

    def ref(self) -> KVRef:
        return KVRef(
            ref="a.kv1",
            execution="e",
            num_tokens=30,
            digest=digest_of(IDS[:30]),
            version=7,
            model="m",
            lease_s=5.0,
            place=self.pin.place,
        )

    def taken(self, *, max_bytes: int = 2**30, version: int = 7) -> tuple[KVTaken, int]:
        """What was said in the end, and in how many steps."""
        self.imports.expect(self.live, 7, lambda: None)
        for num_steps in range(1, 100):
            said, _ = self.imports.advance(self.live, version, max_bytes=max_bytes)
            if said is not None:
                assert not self.imports.is_coming(self.live)
                return said, num_steps
        raise AssertionError("it never ended")

    def is_read(self) -> bool:
        slot = self.table.slot_of(self.live)
        assert slot is not None
        layers = range(NUM_LAYERS)
        return all(
            torch.equal(self.target.layer(k)[:, slot, :30], self.source.layer(k)[:, 1, :30])
            for k in layers
        )


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_what_was_never_measured_is_read_range_by_range(mode: str) -> None:
    async def story() -> None:
        pair = Pair(mode)
        said, num_steps = pair.taken(max_bytes=1)
        assert (said.num_tokens, said.reason, num_steps) == (30, "", 2 * NUM_LAYERS)
        assert said.num_bytes == 30 * pair.target.bytes_per_token
        assert pair.is_read()
        assert pair.table.num_cached[pair.table.slot_of(pair.live)] == 30

    play(story())


@pytest.mark.parametrize(("tokens_per_s", "num_read"), [(1e9, 0), (1.0, 30)])
def test_auto_takes_what_is_faster_by_what_was_measured(tokens_per_s: float, num_read: int) -> None:
    async def story() -> None:
        pair = Pair("auto")
        pair.imports.prefill.measured(tokens_per_s, 1.0)
        pair.imports.transfer.measured(1e6, 1.0)
        said, _ = pair.taken()
        assert said.num_tokens == num_read
        assert ("computing takes about" in said.reason) == (num_read == 0)

    play(story())


def test_auto_tries_again_after_some_that_were_computed_since_speeds_change() -> None:
    async def story() -> None:
        pair = Pair("auto")
        pair.imports.prefill.measured(10.0, 1.0)
        pair.imports.transfer.measured(1.0, 1.0)
        read = []
        for _ in range(3 * TRY_AGAIN_AFTER):
            said, _ = pair.taken()
            read.append(said.num_tokens > 0)
            pair.imports.forget(pair.live)
            if read[-1]:
                pair.table.spoil(pair.live)
                pair.table.free(pair.live)
        first = read.index(True)
        assert first == TRY_AGAIN_AFTER
        assert all(read[first:])

    play(story())


def test_on_reads_also_where_computing_is_faster() -> None:
    async def story() -> None:
        pair = Pair("on")
        pair.imports.prefill.measured(1e9, 1.0)
        pair.imports.transfer.measured(1e6, 1.0)
        assert pair.taken()[0].num_tokens == 30

    play(story())


def test_a_pin_that_ends_between_two_steps_is_computed_and_its_slot_is_given_back() -> None:
    async def story() -> None:
        pair = Pair("on")
        pair.imports.expect(pair.live, 7, lambda: None)
        assert pair.imports.advance(pair.live, 7, max_bytes=1)[0] is None
        pair.pin.end()
        said = None
        while said is None:
            said, _ = pair.imports.advance(pair.live, 7, max_bytes=1)
        assert (said.num_tokens, said.reason) == (0, "its lease is over")
        assert pair.table.num_free == SHAPE.num_slots
        assert all(not pair.target.layer(k).any() for k in range(NUM_LAYERS))

    play(story())


def test_new_weights_between_expecting_and_reading_are_noticed() -> None:
    async def story() -> None:
        pair = Pair("on")
        said, _ = pair.taken(version=8)
        assert said.num_tokens == 0
        assert "of version 7, here is 8" in said.reason

    play(story())


def test_ranges_that_are_not_those_of_this_pool_are_computed() -> None:
    async def story() -> None:
        pair = Pair("on")
        place = pair.pin.place
        forged = msgspec.structs.replace(
            place, num_ranges=1, range_bytes=place.num_ranges * place.range_bytes
        )
        ref = msgspec.structs.replace(pair.ref(), place=forged)
        pair.live = Live(msgspec.structs.replace(pair.live.request, kv=ref))
        said, _ = pair.taken()
        assert said.num_tokens == 0
        assert "1 ranges of" in said.reason

    play(story())


def test_what_is_cached_already_is_not_read() -> None:
    async def story() -> None:
        pair = Pair("on")
        earlier = Live(
            GenerateRequest(request_id="q", execution="e", prompt_ids=IDS, max_new_tokens=1)
        )
        slot = pair.table.assign(earlier).slot
        pair.table.num_cached[slot] = 40
        pair.table.free(earlier)
        said, _ = pair.taken()
        assert (said.num_tokens, said.num_bytes) == (30, 0)
        assert "already" in said.reason

    play(story())


def test_a_pool_is_back_with_the_system_once_nobody_reads_it() -> None:
    for plane in ("shm", "tcp"):
        one = pool(plane)
        one.pin(0, 10)
        one.free()
        assert (one.is_allocated, one.capacity_bytes) == (False, 0)
        one.allocate()
        assert one.capacity_bytes == SHAPE.num_slots * 64 * one.bytes_per_token
        one.free()
