"""How fast weights are exposed and pulled, beside a plain copy of the same bytes in the same run.

`python benchmarks/weights.py` prints the tables of README.md. What is pulled was exposed by
processes of their own, one for each part; the reader is this one, into memory it had before. A
quarter of the bytes is one tensor, as an embedding is, the rest are 168 equal ones. The best of
rounds in which the cases take turns.
"""

import contextlib
import itertools
import math
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from opengyre.seams.weights import Descriptor, Snapshot, TensorSpec, WeightPlane
from opengyre.transport import weights
from opengyre.transport.snapshots import pull_named
from opengyre.transport.weights_shm import SharedMemoryPlane
from opengyre.transport.weights_tcp import TcpPlane

SIZES_MB = (5, 54, 540)
KINDS = ("shm", "tcp")
NUM_PARTS = (1, 2)
CHECKED = ("yes", "no")
NUM_SMALL = 168
NUM_ROUNDS = 5
SHM = Path("/dev/shm")

Tensors = dict[str, np.ndarray]
Names = tuple[str | int, ...]


def tensors_of(num_mb: int) -> Tensors:
    """float32, `num_mb` million bytes."""
    num_floats = num_mb * 10**6 // 4
    sizes = [num_floats // 4] + [num_floats * 3 // 4 // NUM_SMALL] * NUM_SMALL
    flat = np.random.default_rng(0).standard_normal(sum(sizes), dtype=np.float32)
    ends = itertools.accumulate(sizes)
    return {
        f"w{i}": flat[end - size : end]
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }


def part_of(tensors: Tensors, part: int, num_parts: int) -> Tensors:
    """Neighbours, about as many bytes each."""
    total, before, mine = sum(one.nbytes for one in tensors.values()), 0, {}
    for name, one in tensors.items():
        if before * num_parts // total == part:
            mine[name] = one
        before += one.nbytes
    return mine


def plane_of(kind: str, folder: Path, slot: str) -> WeightPlane:
    return SharedMemoryPlane(folder, slot=slot) if kind == "shm" else TcpPlane()


@contextlib.contextmanager
def exposed(kind: str, folder: Path, num_mb: int, num_parts: int) -> Iterator[Snapshot]:
    """A snapshot, one process for each part of it."""
    with contextlib.ExitStack() as stack:
        parts = []
        for part in range(num_parts):
            arguments = [kind, str(folder), str(num_mb), str(part), str(num_parts)]
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "expose", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert process.stdout is not None
            parts.append(msgspec.json.decode(process.stdout.readline(), type=Descriptor))
        yield Snapshot(version=1, parts=parts)


def expose_and_wait(kind: str, folder: Path, num_mb: int, part: int, num_parts: int) -> None:
    plane = plane_of(kind, folder, f"{num_mb}-{part}-{num_parts}")
    mine = part_of(tensors_of(num_mb), part, num_parts)
    sys.stdout.buffer.write(msgspec.json.encode(plane.expose(mine, 1)) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    plane.close()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """No checksum is computed: what else a pull costs."""
    whole, weights.checksum_of = weights.checksum_of, lambda _: 0
    try:
        yield
    finally:
        weights.checksum_of = whole


def without_checksums(snapshot: Snapshot) -> Snapshot:
    def bare(spec: TensorSpec) -> TensorSpec:
        return msgspec.structs.replace(spec, checksum=0)

    parts = [
        msgspec.structs.replace(part, tensors=[bare(spec) for spec in part.tensors])
        for part in snapshot.parts
    ]
    return Snapshot(version=snapshot.version, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`run` is timed."""

    names: Names
    run: Callable[[], object]


def timed(cases: list[Case]) -> dict[Names, float]:
    """The least seconds; a round that is not counted comes first."""
    taken: dict[Names, float] = {case.names: math.inf for case in cases}
    for round_number in range(NUM_ROUNDS + 1):
        for case in cases:
            begin_s = time.perf_counter()
            case.run()
            if round_number:
                taken[case.names] = min(taken[case.names], time.perf_counter() - begin_s)
    return taken


def pull_cases(
    kind: str, snapshot: Snapshot, into: Tensors, reader: WeightPlane, num_parts: int
) -> list[Case]:
    bare = without_checksums(snapshot)

    def pull_unchecked() -> None:
        with unchecked():
            pull_named(reader, bare, into)

    return [
        Case(
            names=("pull", kind, num_parts, "yes"),
            run=lambda: pull_named(reader, snapshot, into),
        ),
        Case(names=("pull", kind, num_parts, "no"), run=pull_unchecked),
    ]


def expose_cases(kind: str, plane: WeightPlane, folder: Path, tensors: Tensors) -> list[Case]:
    """As the core does at each step; and the first time, when there is no memory to write anew."""

    def expose_unchecked() -> None:
        with unchecked():
            plane.expose(tensors, 1)

    def expose_first() -> None:
        with contextlib.closing(plane_of(kind, folder, "first")) as first:
            first.expose(tensors, 1)

    return [
        Case(names=("expose", kind, "yes"), run=lambda: plane.expose(tensors, 1)),
        Case(names=("expose", kind, "no"), run=expose_unchecked),
        Case(names=("expose", kind, "first"), run=expose_first),
    ]


def copy_cases(tensors: Tensors, into: Tensors) -> list[Case]:
    def copy() -> None:
        for name, one in tensors.items():
            np.copyto(into[name], one)

    def over_all(checksum: Callable[[memoryview], int]) -> Callable[[], object]:
        return lambda: [checksum(weights.bytes_of(one)) for one in tensors.values()]

    return [
        Case(names=("copy",), run=copy),
        Case(names=("xxh3_64",), run=over_all(weights.checksum_of)),
        Case(names=("crc32",), run=over_all(zlib.crc32)),
    ]


def measure(num_mb: int, folder: Path) -> dict[Names, float]:
    tensors = tensors_of(num_mb)
    into = {name: np.zeros_like(one) for name, one in tensors.items()}
    cases = copy_cases(tensors, into)
    with contextlib.ExitStack() as stack:
        for kind in KINDS:
            plane = plane_of(kind, folder, "reader")
            stack.callback(plane.close)
            cases += expose_cases(kind, plane, folder, tensors)
            for num_parts in NUM_PARTS:
                snapshot = stack.enter_context(exposed(kind, folder, num_mb, num_parts))
                cases += pull_cases(kind, snapshot, into, plane, num_parts)
        return timed(cases)


class Table:
    """Speeds as cells of Markdown: GB/s, and the share of a plain copy's speed."""

    def __init__(self, num_mb: int, taken_s: dict[Names, float]) -> None:
        self._num_mb = num_mb
        self._taken_s = taken_s

    def cell(self, *names: str | int) -> str:
        taken_s = self._taken_s[names]
        share = self._taken_s[("copy",)] / taken_s
        return f"{self._num_mb / 1000 / taken_s:.1f} ({share:.2f})"

    def plain(self) -> str:
        cells = [self.cell(name) for name in ("copy", "xxh3_64", "crc32")]
        return " | ".join(["", str(self._num_mb), *cells, ""]).strip()

    def exposing(self, kind: str) -> str:
        cells = [self.cell("expose", kind, how) for how in ("yes", "no", "first")]
        return " | ".join(["", str(self._num_mb), kind, *cells, ""]).strip()

    def pulling(self, kind: str) -> str:
        cells = [self.cell("pull", kind, parts, how) for parts in NUM_PARTS for how in CHECKED]
        return " | ".join(["", str(self._num_mb), kind, *cells, ""]).strip()


HEADS = {
    "plain": "| MB | copy | xxh3_64 | crc32 |",
    "exposing": "| MB | plane | expose | without checksum | into new memory |",
    "pulling": "| MB | plane | pull | without checksum | of two parts | without checksum |",
}


def main() -> None:
    lines: dict[str, list[str]] = {kind: [] for kind in HEADS}
    for num_mb in SIZES_MB:
        with tempfile.TemporaryDirectory(dir=SHM, prefix="gyre-bench-") as folder:
            table = Table(num_mb, measure(num_mb, Path(folder)))
        lines["plain"].append(table.plain())
        lines["exposing"] += [table.exposing(kind) for kind in KINDS]
        lines["pulling"] += [table.pulling(kind) for kind in KINDS]
    for kind, head in HEADS.items():
        print(head, "|---" * (head.count("|") - 1) + "|", *lines[kind], "", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["expose"]:
        _, _, kind, folder, *numbers = sys.argv
        expose_and_wait(kind, Path(folder), *(int(number) for number in numbers))
    else:
        main()
