"""Gloo groups of a prefix over a real store: members here are threads, each with its own groups."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opengyre.seams.cells import Rendezvous
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.group_limits import NUM_KEPT, GroupLimits
from opengyre.trainer.prefix_groups import GroupStore, PrefixGroups

SHORT = GroupLimits(meet_s=1.0, connect_s=1.0, stall_s=0.5, reduce_s=5.0)
LOOPBACK_HEX = "0100007F"
TCP_LISTEN = "0A"


class Cells:
    """Three members and the store of the first."""

    def __init__(self, limits: GroupLimits) -> None:
        self.store = GroupStore()
        self.groups = [PrefixGroups(limits=limits) for _ in range(3)]
        self._pool = ThreadPoolExecutor(3)

    def reduce(
        self, name: str, flats: Sequence[Tensor], *, ranks: Sequence[int] = (0, 1, 2), size: int = 3
    ) -> list[Tensor | BoundaryError]:
        """What each of `ranks` gets when they call at the same time, and no other does."""

        def call(rank: int) -> Tensor | BoundaryError:
            place = Rendezvous(store=self.store.address, name=name, rank=rank, size=size)
            try:
                return self.groups[rank].reduce_copy(flats[rank], rendezvous=place, stage=0)
            except BoundaryError as error:
                return error

        return list(self._pool.map(call, ranks))

    def close(self) -> None:
        for one in self.groups:
            one.close()
        self.store.close()
        self._pool.shutdown()


@pytest.fixture
def cells() -> Iterator[Cells]:
    torch.set_num_threads(1)
    made = Cells(SHORT)
    yield made
    made.close()


def _num_open() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _listeners() -> list[str]:
    """Local addresses (hex) at which this process listens over TCP."""
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    sockets = {os.readlink(one) for one in links if one.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == TCP_LISTEN and f"socket:[{rest[5]}]" in sockets:
                found.append(local.split(":")[0])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_all_members_add_up_at_the_core_and_no_member_loses_its_own(
    cells: Cells, dtype: torch.dtype
) -> None:
    flats = [torch.full((100_003,), 10.0**rank, dtype=dtype) for rank in range(3)]
    first = cells.reduce("a", flats)
    assert isinstance(first[0], Tensor)
    assert torch.equal(first[0], torch.full_like(flats[0], 111.0))
    again = cells.reduce("a", flats)
    assert isinstance(again[0], Tensor)
    assert torch.equal(again[0], first[0])
    assert [float(flat.sum()) for flat in flats] == [100_003.0 * 10**rank for rank in range(3)]
    assert [one.num_made for one in cells.groups] == [1, 1, 1]


def test_sums_of_several_chunks_arrive_whole(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opengyre.trainer.prefix_groups.CHUNK_BYTES", 64)
    flats = [torch.arange(1001, dtype=torch.float64) * (rank + 1) for rank in range(3)]
    reduced = cells.reduce("chunks", flats)[0]
    assert isinstance(reduced, Tensor)
    assert torch.equal(reduced, torch.arange(1001, dtype=torch.float64) * 6)


def test_one_member_alone_needs_nobody(cells: Cells) -> None:
    flat = torch.ones(4)
    (reduced,) = cells.reduce("alone", [flat], ranks=[0], size=1)
    assert isinstance(reduced, Tensor)
    assert torch.equal(reduced, flat)
    assert reduced.data_ptr() != flat.data_ptr()
    assert cells.groups[0].num_made == 0


@pytest.mark.parametrize("present", [[0], [0, 1]])
def test_who_misses_a_member_gives_up_in_time_and_another_name_works(
    cells: Cells, present: list[int]
) -> None:
    flats = [torch.ones(8) for _ in range(3)]
    for failed in cells.reduce("absent", flats, ranks=present):
        assert isinstance(failed, BoundaryError)
        assert failed.retryable
        assert "absent" in str(failed)
    reduced = cells.reduce("all", flats)[0]
    assert isinstance(reduced, Tensor)
    assert reduced.tolist() == [3.0] * 8


def test_a_member_that_does_not_take_part_in_time_fails_the_others(cells: Cells) -> None:
    flats = [torch.ones(1000) for _ in range(3)]
    assert all(isinstance(one, Tensor) for one in cells.reduce("late", flats))
    for failed in cells.reduce("late", flats, ranks=[0, 1]):
        assert isinstance(failed, BoundaryError)
        assert failed.retryable
    assert [one.num_made for one in cells.groups] == [0, 0, 1]
    assert [float(flat.sum()) for flat in flats] == [1000.0] * 3


def test_a_member_that_drops_the_group_fails_the_others_at_once() -> None:
    cells = Cells(GroupLimits())
    flats = [torch.ones(1000) for _ in range(3)]
    assert all(isinstance(one, Tensor) for one in cells.reduce("torn", flats))
    cells.groups[2].close()
    started_s = time.monotonic()
    failed = cells.reduce("torn", flats, ranks=[0, 1])
    assert time.monotonic() - started_s < GroupLimits().stall_s / 2
    assert all(isinstance(one, BoundaryError) for one in failed)
    cells.close()


def test_thirty_memberships_leave_no_more_files_and_threads_than_the_kept_ones(
    cells: Cells,
) -> None:
    flats = [torch.ones(16) for _ in range(3)]
    for number in range(NUM_KEPT):
        cells.reduce(f"first/{number}", flats)
    before = _num_open()
    for number in range(30):
        reduced = cells.reduce(f"next/{number}", flats)[0]
        assert isinstance(reduced, Tensor)
    assert [one.num_made for one in cells.groups] == [NUM_KEPT] * 3
    after = _num_open()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_store_and_groups_listen_on_loopback_only(cells: Cells) -> None:
    cells.reduce("listen", [torch.ones(4) for _ in range(3)])
    listeners = _listeners()
    assert len(listeners) >= 2
    assert set(listeners) == {LOOPBACK_HEX}
    host, _, port = cells.store.address.rpartition(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), timeout=5.0).close()


def test_a_core_that_starts_again_hosts_another_store_and_its_members_follow(cells: Cells) -> None:
    flats = [torch.ones(4) for _ in range(3)]
    cells.reduce("old", flats)
    cells.store.close()
    cells.store = GroupStore()
    reduced = cells.reduce("new", flats)[0]
    assert isinstance(reduced, Tensor)
    assert reduced.tolist() == [3.0] * 4
    assert [one.num_made for one in cells.groups] == [1, 1, 1]


def test_members_give_up_before_the_controller_does() -> None:
    for limits in (GroupLimits(), replace(GroupLimits(), meet_s=30.0, reduce_s=600.0)):
        assert limits.construct_s + limits.reduce_s < limits.answer_s
