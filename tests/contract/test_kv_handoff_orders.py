"""All orders of {export, import, cancel, deaths, lease end, completion} for one request.

After each: the same tokens from somewhere, one terminal chunk a stream, no pin, free memory. A
sample is played each time, another one each day or by ORDERS_SEED; all of them by the slow test.
"""

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
import torch
from handoff_orders import Event, Order, all_orders, batches, play_order
from handoff_rig import KINDS, SCRIPTED, TORCH, Kind, kind_params

from opengyre.engines.compute import ComputeThread

ORDERS = all_orders()
SEED = int(os.environ.get("ORDERS_SEED") or time.strftime("%Y%m%d"))


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


def sample(num_orders: int, capsys: pytest.CaptureFixture[str]) -> list[Order]:
    with capsys.disabled():
        os.write(1, f"\n{num_orders} orders: ORDERS_SEED={SEED}\n".encode())
    return random.Random(SEED).sample(ORDERS, num_orders)


def test_scripted_engines_play_a_sample_of_the_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_orders(SCRIPTED, sample(400, capsys), tmp_path, num_at_once=80)


@pytest.mark.parametrize("name", kind_params(*(one.name for one in TORCH)))
def test_torch_engines_play_a_sample_of_the_orders(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_orders(KINDS[name], sample(12, capsys), tmp_path, num_at_once=6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_every_order_is_played(name: str, tmp_path: Path) -> None:
    num_at_once = 80 if KINDS[name] is SCRIPTED else 12
    play_orders(KINDS[name], ORDERS, tmp_path, num_at_once=num_at_once)


@pytest.mark.parametrize("name", kind_params(*(one.name for one in TORCH)))
def test_what_follows_an_import_is_played_by_torch_engines(name: str, tmp_path: Path) -> None:
    begun = (Event.EXPORT, Event.IMPORT)
    orders: list[Order] = [one for one in ORDERS if len(one) == 3 and one[:2] == begun]
    assert len(orders) == 5
    play_orders(KINDS[name], orders, tmp_path, num_at_once=5)
