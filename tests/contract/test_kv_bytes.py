"""Pinned bytes between two real processes, by shared memory and by TCP: right, guarded, and gone
when they are gone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import BoundaryError
from opengyre.seams.kv import KVPlace
from opengyre.transport.kv import KVReading
from opengyre.transport.kv_memory import KVMemory
from opengyre.transport.kv_open import open_reading
from opengyre.transport.kv_tcp import KVServer

RANGES = [(0, 5000), (20_000, 5000), (40_000, 5000)]
NUM_BYTES = 60_000
KINDS = ("shm", "tcp")
_SOURCE = """
import sys
import msgspec
import numpy as np
from opengyre.transport.kv_memory import KVMemory
from opengyre.transport.kv_tcp import KVServer

memory = KVMemory(60_000, num_slots=4)
memory.view[:] = np.arange(60_000) % 251
pins = KVServer(memory) if sys.argv[1] == "tcp" else memory
place = pins.pin(2, [(0, 5000), (20_000, 5000), (40_000, 5000)])
print(msgspec.json.encode(place).decode(), flush=True)
for line in sys.stdin:
    pins.unpin(place.key)
    memory.view[:] = 255
    print("unpinned", flush=True)
"""


@contextmanager
def source(kind: str) -> Iterator[tuple[subprocess.Popen[str], KVPlace]]:
    """A process that pins, and unpins at each line it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SOURCE, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, msgspec.json.decode(process.stdout.readline(), type=KVPlace)
    finally:
        process.kill()
        process.communicate()


def unpin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("unpin\n")
    process.stdin.flush()
    assert process.stdout.readline() == "unpinned\n"


def here(reading: KVReading) -> KVReading:
    asyncio.run(asyncio.wait_for(reading.wait_here(), 20))
    return reading


def read_all(reading: KVReading) -> np.ndarray[Any, Any]:
    made = np.empty((len(RANGES), 5000), np.uint8)
    for number in range(len(RANGES)):
        reading.copy(number, made[number])
    return made


def expected() -> np.ndarray[Any, Any]:
    whole = (np.arange(NUM_BYTES) % 251).astype(np.uint8)
    return np.stack([whole[start : start + size] for start, size in RANGES])


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_reads_the_pinned_ranges(kind: str) -> None:
    with source(kind) as (_, place):
        assert (place.kind, place.num_bytes) == (kind, 15_000)
        reading = here(open_reading(place))
        assert np.array_equal(read_all(reading), expected())
        reading.check()
        reading.close()
        reading.close()


def test_memory_that_is_unpinned_while_it_is_read_is_not_believed() -> None:
    with source("shm") as (process, place):
        reading = open_reading(place)
        unpin(process)
        assert (read_all(reading) == 255).all()
        with pytest.raises(BoundaryError, match="its lease is over"):
            reading.check()
        reading.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pin_that_is_over_cannot_be_read(kind: str) -> None:
    with source(kind) as (process, place):
        unpin(process)
        with pytest.raises(BoundaryError, match="its lease is over"):
            here(open_reading(place)).check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_was_killed_is_gone(kind: str) -> None:
    with source(kind) as (process, place):
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(BoundaryError):
            here(open_reading(place)).check()


def test_a_reading_that_began_before_its_source_was_killed_is_whole() -> None:
    with source("shm") as (process, place):
        reading = open_reading(place)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert np.array_equal(read_all(reading), expected())
        reading.check()
        reading.close()


@pytest.mark.parametrize("kind", KINDS)
def test_another_key_reads_nothing(kind: str) -> None:
    with source(kind) as (_, place):
        forged = msgspec.structs.replace(place, key="0" * len(place.key))
        with pytest.raises(BoundaryError):
            here(open_reading(forged)).check()


def _address(place: KVPlace, part: int, words: str) -> KVPlace:
    parts = place.address.split("/")
    parts[part] = words
    return msgspec.structs.replace(place, address="/".join(parts))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        *((0, "1"), (0, "999999999"), (0, "-1"), (1, "0"), (1, "9999"), (2, "00" * 16)),
        *((2, "zz"), (3, "1000000"), (3, "-1"), (4, "0,1"), (4, "0,1,99999999999")),
        *((4, "-5,0,1"), (4, "x")),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_line(part: int, words: str) -> None:
    with source("shm") as (_, place):
        with pytest.raises(BoundaryError) as raised:
            open_reading(_address(place, part, words)).check()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"range_bytes": 0},
        {"range_bytes": 2**40},
        {"num_ranges": 2},
        {"num_ranges": 10**9},
        {"kind": "carrier pigeon"},
        {"address": ""},
        {"key": "short"},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_none_is_refused(kind: str, changes: dict[str, Any]) -> None:
    with source(kind) as (_, place):
        with pytest.raises(BoundaryError) as raised:
            here(open_reading(msgspec.structs.replace(place, **changes))).check()
        assert "\n" not in str(raised.value)


def test_memory_is_back_with_the_system_when_source_and_reader_let_go() -> None:
    num_bytes = 64 * 2**20
    before = _resident_bytes()
    memory = KVMemory(num_bytes, num_slots=1)
    assert memory.view is not None
    memory.view[:] = 1
    assert _resident_bytes() - before > num_bytes * 0.9
    reading = open_reading(memory.pin(0, [(0, num_bytes)]))
    memory.close()
    with pytest.raises(BoundaryError, match="its lease is over"):
        reading.check()
    reading.close()
    assert _resident_bytes() - before < num_bytes * 0.1


def test_a_view_that_somebody_keeps_is_found_at_the_close() -> None:
    memory = KVMemory(1000, num_slots=1)
    kept = memory.view
    with pytest.raises(InvariantError, match="still referenced"):
        memory.close()
    del kept


def test_a_server_that_closes_leaves_no_socket_and_lets_a_reader_go() -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    memory = KVMemory(NUM_BYTES, num_slots=1)
    server = KVServer(memory)
    reading = here(open_reading(server.pin(0, RANGES)))
    reading.check()
    reading.close()
    server.close()
    server.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == num_before


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
