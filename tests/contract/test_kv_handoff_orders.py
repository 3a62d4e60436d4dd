"""All orders of {export, import, cancel, deaths, lease end, completion} for one request.

After each: the same tokens from somewhere, one terminal chunk a stream, no pin, free memory. Every
order is played by the scripted engines; torch plays a sample, whose seed is printed.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_orders import Event, Order, all_orders, batches, play_order
from handoff_rig import KINDS, SCRIPTED, TORCH, Kind

from opengyre.engines.compute import ComputeThread

NUM_SAMPLED = 24
ORDERS = all_orders()


def play_orders(kind: Kind, orders: list[Order], folder: Path, *, num_at_once: int) -> None:
    computes = [ComputeThread(on_start=lambda: torch.set_num_threads(1)) for _ in range(3)]

    async def main() -> None:
        for batch in batches(orders, num_at_once):
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for number, order in batch:
                    group.create_task(play_order(kind, order, computes, folder, number))

    try:
        asyncio.run(main())
    finally:
        for one in computes:
            one.close()


def test_the_orders_are_all_there() -> None:
    assert len(ORDERS) == len(set(ORDERS)) > 500
    assert {len(one) for one in ORDERS} == set(range(len(Event) + 1))
    handed = [one for one in ORDERS if {Event.EXPORT, Event.IMPORT} <= set(one)]
    assert len(handed) > len(ORDERS) / 3


@pytest.mark.timeout(300)
def test_scripted_engines_play_every_order(tmp_path: Path) -> None:
    play_orders(SCRIPTED, ORDERS, tmp_path, num_at_once=80)


@pytest.mark.parametrize("name", [one.name for one in TORCH])
def test_torch_engines_play_a_sample_of_the_orders(name: str, tmp_path: Path) -> None:
    seed = time.time_ns() % 100_000
    print(f"orders of seed {seed}")  # noqa: T201
    chosen = random.Random(seed).sample(ORDERS, NUM_SAMPLED)
    play_orders(KINDS[name], chosen, tmp_path, num_at_once=6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [one.name for one in TORCH])
def test_torch_engines_play_every_order(name: str, tmp_path: Path) -> None:
    play_orders(KINDS[name], ORDERS, tmp_path, num_at_once=12)


def test_short_orders_are_played_with_each_kind(tmp_path: Path) -> None:
    handed: Any = [
        one for one in ORDERS if len(one) == 3 and one[:2] == (Event.EXPORT, Event.IMPORT)
    ]
    assert len(handed) == 5
    for kind in TORCH[:2]:
        folder = tmp_path / kind.name
        folder.mkdir()
        play_orders(kind, handed, folder, num_at_once=5)
