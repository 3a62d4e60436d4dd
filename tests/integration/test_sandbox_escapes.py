"""What a confined program tries against the host and against others, and fails at."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confined import processes_with, spec_of, until

from opengyre.harness import landlock, seccomp
from opengyre.harness.sandbox import Confining, ForkServer, LocalSandbox
from opengyre.harness.selftest import (
    REFUSAL,
    open_sandbox,
    refuse_unconfined,
    sandbox_self_test,
)
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Ending, LaunchResult, Level

ABI = landlock.abi_version()
PYTHON = Path(sys.executable).resolve()
PYTHON_PATHS = (Path(sys.base_prefix),)

pytestmark = pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock")


@pytest.fixture(params=[True, False], ids=["reachable", "private"])
def work_root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Reachable by other users (root then gives each launch its own id), or not."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-sandbox-"))
    if request.param:
        folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run_scripts(root: Path, *scripts: str, gateway_port: int | None = None) -> list[LaunchResult]:
    """Each script as its own execution, all at the same time."""

    async def opened() -> list[LaunchResult]:
        async with open_sandbox(root) as here, asyncio.TaskGroup() as group:
            specs = [
                replace(spec_of(root, script, name=f"e{i:06d}"), gateway_port=gateway_port)
                for i, script in enumerate(scripts)
            ]
            tasks = [group.create_task(here.sandbox.run(spec)) for spec in specs]
        return [task.result() for task in tasks]

    return asyncio.run(opened())


def test_the_self_test_is_passed_soon_and_leaves_nothing(work_root: Path) -> None:
    async def report() -> float:
        async with open_sandbox(work_root) as here:
            assert here.report.level is Level.LANDLOCK
            return here.report.took_s

    assert asyncio.run(report()) < 5.0
    assert list(work_root.iterdir()) == []


@contextlib.asynccontextmanager
async def sandbox_of(confining: Confining) -> AsyncIterator[LocalSandbox]:
    server = ForkServer()
    try:
        yield LocalSandbox(confining, server)
    finally:
        await server.close()


def self_test(confining: Confining, root: Path) -> list[str]:
    async def tested() -> list[str]:
        async with sandbox_of(confining) as sandbox:
            return await sandbox_self_test(sandbox, PYTHON, root, PYTHON_PATHS)

    return asyncio.run(tested())


def test_the_self_test_notices_a_sandbox_that_confines_nothing(tmp_path: Path) -> None:
    open_to_all = Confining(
        level=Level.LANDLOCK, abi=0, is_own_uid=False, is_root_dropped=False, is_filtered=False
    )
    found = self_test(open_to_all, tmp_path)
    for words in ("wrote outside", "overwrote", "read another", "removed a file"):
        assert any(words in sentence for sentence in found), words


@pytest.mark.skipif(not seccomp.is_supported(), reason="no filter for this machine type")
@pytest.mark.parametrize("abi", range(1, ABI + 1))
def test_every_older_landlock_keeps_what_it_promises(tmp_path: Path, abi: int) -> None:
    confining = Confining(
        level=Level.LANDLOCK,
        abi=abi,
        is_own_uid=False,
        is_root_dropped=os.geteuid() == 0,
        is_filtered=True,
    )
    assert self_test(confining, tmp_path) == []


def test_a_sandbox_the_user_asked_not_to_have_still_runs_agents(tmp_path: Path) -> None:
    nothing = Confining(
        level=Level.NONE, abi=0, is_own_uid=False, is_root_dropped=False, is_filtered=False
    )
    assert self_test(nothing, tmp_path) == []


def test_unconfined_agents_are_refused_in_one_line_that_names_the_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unconfined(0, is_unsafe_allowed=False)
    assert str(caught.value) == REFUSAL
    assert "\n" not in REFUSAL
    for word in ("Landlock", "bubblewrap", "--unsafe-no-sandbox"):
        assert word in REFUSAL
    refuse_unconfined(0, is_unsafe_allowed=True)


def test_an_agent_reads_and_writes_nothing_of_another_execution(work_root: Path) -> None:
    other = work_root / "e000000" / "workspace"
    owner, thief = run_scripts(
        work_root,
        "echo mine > secret; sleep 0.5; cat secret",
        f"sleep 0.2; cat {other}/secret; ls {other}; echo x > {other}/planted; rm -rf {other}",
    )
    assert owner.output_tail == "mine\n"
    assert thief.exit_code != 0
    assert "mine" not in thief.output_tail
    assert [path.name for path in other.iterdir()] == ["secret"]


def test_an_agent_cannot_end_the_processes_of_another(work_root: Path) -> None:

    async def opened() -> tuple[LaunchResult, LaunchResult]:
        async with open_sandbox(work_root) as here, asyncio.TaskGroup() as group:
            nap = f"1.0{os.getpid():07d}7"
            owner = group.create_task(here.sandbox.run(spec_of(work_root, f"sleep {nap}; echo ok")))
            await until(lambda: bool(processes_with(f"sleep\0{nap}")))
            (pid,) = processes_with(f"sleep\0{nap}")
            script = f"kill -9 {pid}; kill -9 {os.getpid()}; kill -9 -1; echo failed"
            killer = await here.sandbox.run(spec_of(work_root, script, name="e000002"))
        return owner.result(), killer

    owner, killer = asyncio.run(opened())
    assert owner.output_tail == "ok\n"
    assert killer.ending in (Ending.EXITED, Ending.SIGNALLED)


@pytest.mark.skipif(ABI < landlock.Abi.NET, reason="Landlock without TCP rules")
def test_an_agent_reaches_the_gateway_and_no_other_port(work_root: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        socket.create_server(("127.0.0.1", 0)) as engine,
    ):
        ports = [one.getsockname()[1] for one in (gateway, engine)]
        tries = [f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo yes || echo no" for port in ports]
        results = run_scripts(work_root, *tries, gateway_port=ports[0])
    assert [result.output_tail.splitlines()[-1] for result in results] == ["yes", "no"]


def test_an_agent_sees_only_the_environment_it_was_given(
    work_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_TEST_SECRET", "do-not-tell")
    (result,) = run_scripts(work_root, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert "do-not-tell" not in result.output_tail
    names = {line.split("=")[0] for line in result.output_tail.splitlines()}
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "SHLVL", "_", "OLDPWD"}


def test_an_agent_gains_no_rights_by_a_program_or_a_namespace(work_root: Path) -> None:
    script = "unshare -Ur true && echo namespace; mount -t tmpfs x . && echo mounted; exit 0"
    (result,) = run_scripts(work_root, script)
    assert "namespace" not in result.output_tail.splitlines()
    assert "mounted" not in result.output_tail.splitlines()


def test_devices_and_the_system_cannot_be_changed(work_root: Path) -> None:
    script = (
        "echo ok > /dev/null && echo null; head -c 1 /dev/urandom | wc -c; "
        "touch /usr/x /etc/x /tmp/x /dev/shm/x; echo h > /proc/sys/kernel/hostname; "
        "mknod node b 8 0; cat /etc/shadow; echo end"
    )
    (result,) = run_scripts(work_root, script)
    lines = result.output_tail.splitlines()
    assert lines[:2] == ["null", "1"]
    assert lines[-1] == "end"
    for path in ("/usr/x", "/etc/x", "/tmp/x", "/dev/shm/x"):
        assert not Path(path).exists()
    assert not (work_root / "e000000" / "workspace" / "node").exists()
    assert "root:" not in result.output_tail


def test_an_agent_inherits_no_open_file(work_root: Path) -> None:
    each = "{ : <&$fd || : >&$fd; } 2>/dev/null && echo open $fd"
    script = f"for fd in {{3..9}} {{11..40}}; do {each}; done; :"
    (result,) = run_scripts(work_root, script)
    assert result.output_tail == ""
    assert result.exit_code == 0
