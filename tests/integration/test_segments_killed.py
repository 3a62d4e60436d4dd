"""Token segments whose writer is killed, with -9, at any moment: what was told is there."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness_bodies import NUM_SAMPLED, turn_record

from opengyre.store.segments import Damage, SegmentReader, SegmentWriter, segment_numbers

DEADLINE_S = 30.0
ROTATE_BYTES = 40_000


async def write_for_ever(folder: Path) -> None:
    """Append three records, sync, tell the last one's place; the next three are not synced."""
    writer, n = SegmentWriter(folder, rotate_bytes=ROTATE_BYTES), 0
    while True:
        for _ in range(3):
            n += 1
            writer.append(turn_record(n, num_kept=0, num_new=50, delta=b"x" * n))
        await writer.sync()
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
        writer.append(turn_record(n + 1, num_kept=0, num_new=50, delta=b"untold"))
        n += 1


@pytest.mark.parametrize("num_told", [1, 4, 9, 20])
def test_what_was_told_is_there_after_kill_9_and_a_new_writer_goes_on(
    tmp_path: Path, num_told: int
) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(num_told)][-1]
        writer.send_signal(signal.SIGKILL)
        writer.wait(DEADLINE_S)
    numbers, damage = read_numbers(tmp_path)
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= told
    assert len(damage) <= 1
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    append_one(tmp_path, len(numbers) + 1)
    assert read_numbers(tmp_path)[0] == [*numbers, len(numbers) + 1]
    assert {path: path.read_bytes() for path in before} == before


def read_numbers(folder: Path) -> tuple[list[int], list[Damage]]:
    """Numbers of the turns in order; each record is what was written."""
    reader, numbers = SegmentReader(folder), []
    damage: list[Damage] = []
    for segment in segment_numbers(folder):
        for record in reader.scan(segment, on_damage=damage.append):
            number = int(record.header.turn.rpartition(".t")[2])
            wanted = turn_record(number, num_kept=0, num_new=50, delta=b"")
            assert record.completion_ids == wanted.completion_ids
            assert len(record.logprobs) == NUM_SAMPLED
            numbers.append(number)
    return numbers, damage


def append_one(folder: Path, n: int) -> None:
    async def write() -> None:
        writer = SegmentWriter(folder)
        writer.append(turn_record(n, num_kept=0, num_new=50, delta=b""))
        await writer.close()

    asyncio.run(write())


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1])))
