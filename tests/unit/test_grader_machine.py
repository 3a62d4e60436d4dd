"""Trouble of this machine while a grader runs is no verdict, also when it is over at the end."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from opengyre.seams.harness import Ending, LaunchResult, LaunchSpec, Limits, RunConfined
from opengyre.seams.tasks import Task, Verdict
from opengyre.tasks.command_grader import CommandGrader
from opengyre.tasks.machine import Machine

MIB = 1 << 20
ENDED = LaunchResult(
    ending=Ending.EXITED,
    exit_code=1,
    signal=None,
    output_tail="",
    num_output_bytes=0,
    wall_s=0.1,
    reason="as the test says",
)


async def blame(spec: LaunchSpec) -> LaunchResult:
    return ENDED


def grade(root: Path, machine: Machine, *, run: RunConfined = blame) -> Verdict:
    for name in ("scratch", "workspace"):
        (root / name).mkdir(exist_ok=True)
    task = Task(
        name="one",
        folder=root,
        instruction="",
        workspace=None,
        tests=root / "tests",
        content_hash="",
    )
    grader = CommandGrader(
        run=run,
        limits=Limits(wall_s=1.0),
        command=("true",),
        exit_rewards={0: 1.0, 1: 0.0},
        machine=machine,
    )
    return asyncio.run(grader.grade(task, workspace=root / "workspace", scratch=root / "scratch"))


def test_nothing_is_started_on_a_full_disk(tmp_path: Path) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        raise AssertionError("it was started")

    verdict = grade(tmp_path, Machine(min_free_bytes=1 << 62), run=run)
    assert verdict.reward is None
    assert "the disk is full" in verdict.reason


def test_a_disk_without_inodes_is_full(tmp_path: Path) -> None:
    if not os.statvfs(tmp_path).f_files:
        pytest.skip("this file system does not count inodes")
    verdict = grade(tmp_path, Machine(min_free_inodes=1 << 62))
    assert verdict.reward is None
    assert "the disk is full" in verdict.reason
    assert "inodes" in verdict.reason


def fill(path: Path) -> None:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 256 * MIB)


@pytest.mark.parametrize("was_full_s", [0.0, 0.2])
def test_a_disk_that_was_full_for_a_while_is_no_verdict(tmp_path: Path, was_full_s: float) -> None:
    async def run(spec: LaunchSpec) -> LaunchResult:
        if was_full_s:
            await asyncio.to_thread(fill, tmp_path / "giant")
            await asyncio.sleep(was_full_s)
            (tmp_path / "giant").unlink(missing_ok=True)
        return ENDED

    found = os.statvfs(tmp_path)
    bound = found.f_bavail * found.f_frsize - 128 * MIB
    verdict = grade(tmp_path, Machine(min_free_bytes=bound, look_every_s=0.02), run=run)
    assert verdict.reward == (None if was_full_s else 0.0)
    assert ("the disk is full" in verdict.reason) == bool(was_full_s)


def counting(vmstat: Path, result: LaunchResult, *, num_attempts_hit: int) -> RunConfined:
    """Each launch of the first ones sees the kernel kill one more program."""
    vmstat.write_text("nr_free_pages 9\noom_kill 0\n")
    num_kills = 0

    async def run(spec: LaunchSpec) -> LaunchResult:
        nonlocal num_kills
        num_kills = min(num_kills + 1, num_attempts_hit)
        text = f"nr_free_pages 7\noom_kill {num_kills}\n"
        await asyncio.to_thread(vmstat.write_text, text)
        return result

    return run


def test_a_kill_for_lack_of_memory_is_no_verdict(tmp_path: Path) -> None:
    machine = Machine(vmstat=tmp_path / "vmstat")
    run = counting(machine.vmstat, ENDED, num_attempts_hit=2)
    verdict = grade(tmp_path, machine, run=run)
    assert verdict.reward is None
    assert "this machine ran out of memory while it was graded" in verdict.reason


def test_a_machine_that_has_memory_again_gives_the_verdict(tmp_path: Path) -> None:
    machine = Machine(vmstat=tmp_path / "vmstat")
    run = counting(machine.vmstat, ENDED, num_attempts_hit=1)
    verdict = grade(tmp_path, machine, run=run)
    assert verdict == Verdict(reward=0.0, reason="graded: exit code 1")


def test_a_launch_that_crossed_its_own_limit_says_so(tmp_path: Path) -> None:
    machine = Machine(vmstat=tmp_path / "vmstat")
    result = replace(ENDED, ending=Ending.MEMORY_LIMIT, exit_code=None)
    run = counting(machine.vmstat, result, num_attempts_hit=2)
    verdict = grade(tmp_path, machine, run=run)
    assert verdict.reward is None
    assert "ended by memory_limit" in verdict.reason
    assert "ran out of memory" not in verdict.reason


@pytest.mark.parametrize("text", [None, "", "nr_free_pages 9\n"])
def test_a_kernel_that_counts_no_kills_is_believed(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "vmstat").write_text(text)
    assert grade(tmp_path, Machine(vmstat=tmp_path / "vmstat")).reward == 0.0
