"""How long the sums of several cells take to the core: in a group, and as a star.

`python benchmarks/reduction.py` prints the tables of README.md. Members are processes of their own,
with one torch thread; float32 sums. Recovery is that of the controller's protocol over real cell
processes, of which one is killed in the reduce. Medians; the cases take turns.
"""

import asyncio
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from opengyre.seams.cells import Rendezvous
from opengyre.seams.weights import Snapshot
from opengyre.store.observations import StepReport
from opengyre.trainer.group_limits import GroupLimits
from opengyre.trainer.prefix_groups import GroupStore, PrefixGroups
from opengyre.transport.snapshots import pull_named
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.integration.reduce_rig import ReduceRig

SIZES_MB = (3, 30, 240)
NUM_MEMBERS = (2, 3, 4)
NUM_ROUNDS = 5
NUM_FRESH = 20
KILLS_MB = 64
NUM_KILLS = 3
FRESH = "while the group is made"
KILLS = {
    "before it settles": ("settle", 0.0),
    FRESH: ("in", 0.002),
    "in the reduce": ("in", 0.02),
    "after the reduce": ("after", 0.0),
}
SHM = "/dev/shm"
SUMS = "sums"


class Member:
    """One cell's side: answers orders, one JSON line each."""

    def __init__(self, rank: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._groups = PrefixGroups()
        self._plane = SharedMemoryPlane(folder, slot=f"c{rank}")
        self._flat = torch.zeros(0)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "hold":
            self._flat = torch.full((order["num_mb"] * 10**6 // 4,), float(self._rank + 1))
            return {}
        started_s = time.monotonic()
        told: dict[str, Any] = {}
        if order["do"] == "group":
            place = Rendezvous(rank=self._rank, **order["place"])
            self._check(self._groups.reduce_copy(self._flat, rendezvous=place, stage=0), place.size)
        elif order["do"] == "share":
            part = self._plane.expose({SUMS: self._flat.numpy()}, 0)
            snapshot = Snapshot(version=0, parts=[part])
            told["snapshot"] = msgspec.json.encode(snapshot).decode()
        else:
            self._pull([msgspec.json.decode(one, type=Snapshot) for one in order["snapshots"]])
        return {"seconds": time.monotonic() - started_s, **told}

    def _pull(self, snapshots: list[Snapshot]) -> None:
        reduced, pulled = self._flat.clone(), torch.empty_like(self._flat)
        for snapshot in snapshots:
            pull_named(self._plane, snapshot, {SUMS: pulled.numpy()})
            reduced += pulled
        self._check(reduced, len(snapshots) + 1)

    def _check(self, reduced: torch.Tensor, size: int) -> None:
        if self._rank == 0 and float(reduced[-1]) != size * (size + 1) / 2:
            raise ValueError(f"{float(reduced[-1])} of {size} members")

    def close(self) -> None:
        self._groups.close()
        self._plane.close()


class Members:
    """All processes; `ask` sends an order to the first `size` at once."""

    def __init__(self, folder: Path) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "member", str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(max(NUM_MEMBERS))
        ]

    def ask(self, ranks: range, order: dict[str, Any]) -> list[dict[str, Any]]:
        for rank in ranks:
            sink = self._processes[rank].stdin
            assert sink is not None
            sink.write(json.dumps(order) + "\n")
            sink.flush()
        told = []
        for rank in ranks:
            source = self._processes[rank].stdout
            assert source is not None
            told.append(json.loads(source.readline()))
        return told

    def close(self) -> None:
        for one in self._processes:
            one.communicate("")


@contextlib.contextmanager
def members() -> Iterator[tuple[Members, GroupStore]]:
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        store, made = GroupStore(), Members(Path(folder))
        try:
            yield made, store
        finally:
            made.close()
            store.close()


def in_group(made: Members, store: GroupStore, size: int, name: str) -> float:
    place = {"store": store.address, "name": name, "size": size}
    told = made.ask(range(size), {"do": "group", "place": place})
    return max(float(one["seconds"]) for one in told)


def as_star(made: Members, size: int) -> float:
    shared = made.ask(range(1, size), {"do": "share"})
    snapshots = [one["snapshot"] for one in shared]
    (pulled,) = made.ask(range(1), {"do": "pull", "snapshots": snapshots})
    return max(float(one["seconds"]) for one in shared) + float(pulled["seconds"])


def print_reductions(made: Members, store: GroupStore) -> None:
    print("| sums | cells | group | star | star / group |\n|---|---|---|---|---|")
    for num_mb in SIZES_MB:
        made.ask(range(max(NUM_MEMBERS)), {"do": "hold", "num_mb": num_mb})
        for size in NUM_MEMBERS:
            in_group(made, store, size, f"kept/{size}")
            pairs = [
                (in_group(made, store, size, f"kept/{size}"), as_star(made, size))
                for _ in range(NUM_ROUNDS)
            ]
            group_s, star_s = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = star_s / group_s
            print(f"| {num_mb} MB | {size} | {group_s:.3f} s | {star_s:.3f} s | {ratio:.1f} |")


def print_fresh(made: Members, store: GroupStore) -> None:
    """The first reduction of a membership beside the next one, with next to no sums."""
    made.ask(range(max(NUM_MEMBERS)), {"do": "hold", "num_mb": 1})
    print("\n| cells | first reduction of a membership | later ones |\n|---|---|---|")
    for size in NUM_MEMBERS:
        pairs = [
            tuple(in_group(made, store, size, f"fresh/{size}/{number}") for _ in range(2))
            for number in range(NUM_FRESH)
        ]
        first_s, later_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {size} | {first_s * 1e3:.1f} ms | {later_s * 1e3:.1f} ms |")


async def print_recovery() -> None:
    """Four cells, one of which is killed: from the end of the stream to the sums at the core."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        rig = ReduceRig(
            Path(folder) / "run",
            num_cells=4,
            num_weights=KILLS_MB * 10**6 // 8,
            limits=GroupLimits(),
        )
        await rig.start()
        await rig.run_step()
        steady_s = statistics.median([(await rig.run_step()).reduce_s or 0.0 for _ in range(3)])
        print(f"\n{KILLS_MB} MB, 4 cells, undisturbed: {steady_s:.2f} s\n")
        print("| killed | tries | reduced after |\n|---|---|---|")
        for words in KILLS:
            reports = [await _killed(rig, words) for _ in range(NUM_KILLS)]
            seconds = statistics.median(one.reduce_s or 0.0 for one in reports)
            tries = ", ".join(str(one.num_reduce_tries) for one in reports)
            print(f"| {words} | {tries} | {seconds:.2f} s |")
        if not await rig.is_exact():
            raise ValueError("the weights are not those of one cell alone")
        await rig.end()


async def _killed(rig: ReduceRig, words: str) -> StepReport:
    """The group is there already, unless the kill is to meet its making."""
    place, after_s = KILLS[words]
    if words != FRESH:
        await rig.run_step()
    rig.set_trap(3, place, "kill", after_s=after_s)
    report = await rig.run_step()
    await rig.until_dead(3)
    await rig.until_all_live()
    rig.deaths.clear()
    return report


def main() -> None:
    if sys.argv[1:2] == ["member"]:
        member = Member(int(sys.argv[2]), Path(sys.argv[3]))
        for line in sys.stdin:
            print(json.dumps(member.obey(json.loads(line))), flush=True)
        return member.close()
    logging.disable(logging.WARNING)
    with members() as (made, store):
        print_reductions(made, store)
        print_fresh(made, store)
    asyncio.run(print_recovery())


if __name__ == "__main__":
    main()
