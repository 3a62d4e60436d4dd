"""Programs that crash, hang, flood, fork away: each costs its own launch and leaves nothing."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from confined import in_sandbox, processes_with, run_script, spec_of, until

from opengyre.harness import process_tree
from opengyre.harness.sandbox import LocalSandbox
from opengyre.harness.selftest import open_sandbox
from opengyre.seams.harness import Ending, LaunchResult, LaunchSpec

numbers = count(os.getpid() % 10_000 * 1000)


@pytest.fixture
def work_root() -> Iterator[Path]:
    """A folder other users can reach, so that root can hand launches to another id."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-sandbox-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def nap() -> str:
    """A sleep no other process does, to be found again."""
    return f"777.{next(numbers)}"


def test_a_program_that_ends_reports_its_code_and_its_words(work_root: Path) -> None:
    result = run_script(work_root, "echo out; echo err >&2; exit 7")
    assert (result.ending, result.exit_code) == (Ending.EXITED, 7)
    assert result.output_tail == "out\nerr\n"
    assert not result.is_output_truncated
    assert not result.is_our_fault


def test_a_crash_reports_its_signal(work_root: Path) -> None:
    result = run_script(work_root, "kill -SEGV $$")
    assert (result.ending, result.signal) == (Ending.SIGNALLED, signal.SIGSEGV)
    assert result.exit_code is None


def test_a_program_that_is_not_there_is_our_fault(work_root: Path) -> None:
    async def use(sandbox: LocalSandbox) -> LaunchResult:
        spec = spec_of(work_root, "")
        gone = LaunchSpec(
            execution="e000001",
            argv=("/nowhere/agent",),
            workspace=spec.workspace,
            private_tmp=spec.private_tmp,
        )
        return await sandbox.run(gone)

    result = in_sandbox(work_root, use)
    assert result.ending is Ending.NOT_STARTED
    assert "/nowhere/agent" in result.reason
    assert result.is_our_fault


def test_a_hang_that_ignores_sigterm_ends_soon_after_its_deadline(
    work_root: Path, nap: str
) -> None:
    script = f"trap '' TERM; sleep {nap} & sleep {nap}; sleep {nap}"
    result = run_script(work_root, script, wall_s=0.3)
    assert result.is_timed_out
    assert 0.3 <= result.wall_s < 3
    assert processes_with(nap) == []


def test_a_program_may_tidy_up_when_its_time_is_over(work_root: Path) -> None:
    script = "trap 'echo tidy; exit 0' TERM; echo up; sleep 30 & wait"
    result = run_script(work_root, script, wall_s=0.3, grace_s=5)
    assert result.is_timed_out
    assert result.output_tail == "up\ntidy\n"


def test_a_daemon_in_its_own_session_dies_with_the_launch(work_root: Path, nap: str) -> None:
    script = f"setsid bash -c \"trap '' TERM HUP; (setsid sleep {nap} &); sleep {nap}\" & sleep 0.2"
    result = run_script(work_root, script)
    assert result.exit_code == 0
    assert result.wall_s < 5
    assert processes_with(nap) == []


def test_a_flood_of_output_ends_the_launch_and_keeps_its_tail(work_root: Path) -> None:
    result = run_script(work_root, "yes flood", output_bytes=1 << 20)
    assert result.ending is Ending.OUTPUT_LIMIT
    assert result.is_output_truncated
    assert result.output_tail.endswith("flood\n" * 10)
    assert len(result.output_tail) <= 16 << 10


def test_one_process_cannot_take_more_memory_than_allowed(work_root: Path) -> None:
    script = "/usr/bin/env perl -e '$x = \"x\" x (300 << 20); print length $x'"
    result = run_script(work_root, script, memory_bytes=100 << 20)
    assert (result.ending, result.exit_code == 0) == (Ending.EXITED, False)
    assert "emory" in result.output_tail


def test_many_processes_cannot_share_more_memory_than_allowed(work_root: Path) -> None:
    each = "perl -e '$x = \"x\" x (40 << 20); sleep 20'"
    result = run_script(
        work_root, f"for i in 1 2 3 4; do {each} & done; wait", memory_bytes=100 << 20
    )
    assert result.ending is Ending.MEMORY_LIMIT
    assert "allowed are 104857600" in result.reason


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["reachable", "private"])
def test_a_fork_bomb_ends_before_it_spreads(work_root: Path, nap: str, mode: int) -> None:
    work_root.chmod(mode)
    bomb = (
        f"b() {{ [ $1 -gt 0 ] || return; sleep {nap} & b $(($1-1)) & b $(($1-1)) & wait; }}; b 10"
    )
    result = run_script(work_root, f"{bomb}; sleep {nap}", num_processes=60, wall_s=3)
    assert result.ending is not Ending.LOST
    assert result.exit_code != 0
    assert result.wall_s < 12
    assert processes_with(nap) == []


def test_a_file_cannot_grow_beyond_its_limit(work_root: Path) -> None:
    script = "trap '' XFSZ; head -c 3000000 /dev/zero > big; stat -c %s big"
    result = run_script(work_root, script, file_size_bytes=1 << 20)
    assert result.output_tail.endswith("1048576\n")


def test_a_launch_is_cancelled_when_it_is_asked_to_stop(work_root: Path, nap: str) -> None:
    async def use(sandbox: LocalSandbox) -> LaunchResult:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sandbox.run(spec_of(work_root, f"sleep {nap}"), stop=stop))
            await until(lambda: bool(processes_with(nap)))
            stop.set()
        return running.result()

    result = in_sandbox(work_root, use)
    assert (result.ending, result.reason) == (Ending.CANCELLED, "cancelled")
    assert processes_with(nap) == []


def test_a_cancelled_task_has_ended_its_launch_before_it_returns(work_root: Path, nap: str) -> None:
    async def use(sandbox: LocalSandbox) -> list[int]:
        running = asyncio.create_task(sandbox.run(spec_of(work_root, f"sleep {nap}")))
        await until(lambda: bool(processes_with(nap)))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return processes_with(nap)

    async def opened() -> list[int]:
        async with open_sandbox(work_root) as here:
            return await use(here.sandbox)

    assert asyncio.run(opened()) == []


def test_time_in_which_we_hold_a_launch_is_not_charged(work_root: Path) -> None:
    began_s = time.monotonic()
    spec = spec_of(work_root, "sleep 1", wall_s=0.4)
    held_s = lambda: min(time.monotonic() - began_s, 2.0)  # noqa: E731
    result = in_sandbox(work_root, lambda sandbox: sandbox.run(spec, held_s=held_s))
    assert result.ending is Ending.EXITED


def test_a_launch_whose_supervisor_is_killed_is_lost_and_leaves_nothing(
    work_root: Path, nap: str
) -> None:
    async def use(sandbox: LocalSandbox) -> LaunchResult:
        async with asyncio.TaskGroup() as group:
            script = f"setsid sleep {nap} & sleep {nap}"
            running = group.create_task(sandbox.run(spec_of(work_root, script)))
            await until(lambda: len(processes_with(nap)) == 3)
            agent = next(pid for pid in processes_with(nap) if is_child_of_supervisor(pid))
            os.kill(process_tree.read_member(agent).parent, signal.SIGKILL)
        await until(lambda: processes_with(nap) == [])
        return running.result()

    result = in_sandbox(work_root, use)
    assert result.ending is Ending.LOST
    assert result.is_our_fault


def is_child_of_supervisor(pid: int) -> bool:
    parent = process_tree.read_member(pid).parent
    return b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes()


def test_launching_goes_on_after_the_fork_server_was_killed(work_root: Path, nap: str) -> None:
    async def use(sandbox: LocalSandbox) -> LaunchResult:
        server = next(pid for pid in processes_with("forkserver") if is_our_child(pid))
        os.kill(server, signal.SIGKILL)
        await until(lambda: not is_alive(server))
        return await sandbox.run(spec_of(work_root, "echo again"))

    assert in_sandbox(work_root, use).output_tail == "again\n"


def is_our_child(pid: int) -> bool:
    return process_tree.read_member(pid).parent == os.getpid()


def is_alive(pid: int) -> bool:
    member = process_tree.read_member(pid)
    return member is not None and not member.is_zombie


CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from confined import spec_of
from opengyre.harness.selftest import open_sandbox

async def main():
    root = Path(sys.argv[2])
    async with open_sandbox(root) as here:
        await here.sandbox.run(spec_of(root, f"setsid sleep {sys.argv[3]} & sleep {sys.argv[3]}"))

asyncio.run(main())
"""


def test_nothing_is_left_when_the_controller_is_killed(work_root: Path, nap: str) -> None:
    argv = [sys.executable, "-c", CONTROLLER, str(Path(__file__).parent), str(work_root), nap]
    with subprocess.Popen(argv) as controller:
        asyncio.run(until(lambda: len(processes_with(f"sleep\0{nap}")) == 2))
        controller.kill()
    asyncio.run(until(lambda: processes_with(nap) == []))
    asyncio.run(until(lambda: processes_with(str(work_root)) == []))


def test_forty_eight_launches_at_once_all_end_well(work_root: Path) -> None:
    async def opened() -> list[LaunchResult]:
        async with open_sandbox(work_root) as here, asyncio.TaskGroup() as group:
            specs = [
                spec_of(work_root, f"sleep 0.5; echo {i}", name=f"e{i:06d}") for i in range(48)
            ]
            tasks = [group.create_task(here.sandbox.run(spec)) for spec in specs]
        return [task.result() for task in tasks]

    results = asyncio.run(opened())
    assert [result.output_tail for result in results] == [f"{i}\n" for i in range(48)]
    assert {result.exit_code for result in results} == {0}
