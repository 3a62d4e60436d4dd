"""Open a sandbox: find out what this machine can enforce, and prove it before anything runs.

Owns the choice of level, identity and interpreter, and the refusal. Must not know tasks or
models. Invariant: a sandbox is handed out only after an agent inside it failed at every escape,
unless the user asked for none.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opengyre.harness import escape_probe, landlock, seccomp
from opengyre.harness.confine import is_task_bound_kept
from opengyre.harness.sandbox import Confining, ForkServer, LocalSandbox
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Ending, LaunchSpec, Level, Limits

SYSTEM_PYTHON = Path("/usr/bin/python3")
LEAST_PYTHON = (3, 11)
PROBE_LIMITS = Limits(wall_s=10.0, num_processes=64)
REFUSAL = (
    "agents cannot be confined here: this kernel offers no Landlock (Linux 5.13 or later with "
    "`landlock` in its lsm= list) and bubblewrap is not used by this version; run on such a "
    "kernel, or pass --unsafe-no-sandbox to let agents do whatever your user may do"
)
UNCONFINED = "everything: agents may read, write and reach whatever this user may"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxReport:
    """What is enforced. `identity` says in words as whom agents run; `python` is an interpreter
    they can start, with `python_paths` to be readable for it; `not_enforced` in words."""

    level: Level
    abi: int
    identity: str
    python: Path
    python_paths: tuple[Path, ...]
    not_enforced: tuple[str, ...]
    took_s: float

    def describe(self) -> str:
        """One line for a person."""
        gaps = "; not enforced: " + ", ".join(self.not_enforced) if self.not_enforced else ""
        return f"sandbox {self.level} (ABI {self.abi}), agents run as {self.identity}{gaps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSandbox:
    sandbox: LocalSandbox
    report: SandboxReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    confining: Confining
    identity: str
    python: Path
    python_paths: tuple[Path, ...]


@contextlib.asynccontextmanager
async def open_sandbox(
    work_root: Path, *, read_only_paths: Sequence[Path] = (), is_unsafe_allowed: bool = False
) -> AsyncIterator[OpenSandbox]:
    """A sandbox for launches whose workspaces lie below `work_root` (an existing folder).

    `read_only_paths` are what every agent must be able to read (its program). The strongest
    identity that passes the self-test is taken. Raises ConfigError if nothing does.
    """
    started_s = time.monotonic()
    abi = landlock.abi_version()
    refuse_unconfined(abi, is_unsafe_allowed=is_unsafe_allowed)
    async with contextlib.AsyncExitStack() as stack:
        server = ForkServer()
        stack.push_async_callback(server.close)
        failures: list[str] = []
        for candidate in _candidates(abi):
            sandbox = LocalSandbox(candidate.confining, server)
            failures = await sandbox_self_test(
                sandbox, candidate.python, work_root, (*read_only_paths, *candidate.python_paths)
            )
            if not failures:
                report = _report(candidate, time.monotonic() - started_s)
                yield OpenSandbox(sandbox=sandbox, report=report)
                return
        raise ConfigError(f"the sandbox failed its self-test: {'; '.join(failures)}; {REFUSAL}")


def refuse_unconfined(abi: int, *, is_unsafe_allowed: bool) -> None:
    """Raises ConfigError if agents would run unconfined and the user did not ask for that."""
    if not abi and not is_unsafe_allowed:
        raise ConfigError(REFUSAL)


async def sandbox_self_test(
    sandbox: LocalSandbox, python: Path, work_root: Path, read_only_paths: Sequence[Path]
) -> list[str]:
    """Run the escape probe in `sandbox`; sentences about what went wrong, none if all is well."""
    with contextlib.ExitStack() as stack:
        home = work_root / f"selftest-{os.getpid()}"
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        ports = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(2)
        ]
        spec = _probe_spec(sandbox.confining, python, home, tuple(read_only_paths), ports)
        result = await sandbox.run(spec)
    if result.ending is not Ending.EXITED or result.exit_code != 0:
        return [f"{python} did not run: {result.reason} {result.output_tail[-300:]}".strip()]
    found: list[str] = json.loads(result.output_tail)
    is_unconfined = sandbox.confining.level is Level.NONE
    return [words for words in found if not is_unconfined or "cannot" in words]


def _probe_spec(
    confining: Confining, python: Path, home: Path, readable: tuple[Path, ...], ports: list[int]
) -> LaunchSpec:
    """The probe's launch below `home`; it may reach the first of `ports` and not the second."""
    for name in ("workspace", "tmp", "other"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "other" / "secret").write_text("secret")
    plan = {
        "outside": str(home / "other"),
        "pid": os.getpid(),
        "gateway_port": ports[0],
        "other_port": ports[1] if confining.abi >= landlock.Abi.NET else None,
        "is_signal_closed": confining.abi >= landlock.Abi.SCOPE or confining.is_own_uid,
        "is_filtered": confining.is_filtered,
        "readable": [str(path) for path in readable],
        "least_python": LEAST_PYTHON,
    }
    probe = Path(escape_probe.__file__).read_text()
    return LaunchSpec(
        execution="selftest",
        argv=(str(python), "-I", "-S", "-c", probe, json.dumps(plan)),
        workspace=home / "workspace",
        private_tmp=home / "tmp",
        read_only_paths=readable,
        gateway_port=ports[0],
        limits=PROBE_LIMITS,
    )


def _candidates(abi: int) -> list[_Candidate]:
    """Ways to run agents here, the strongest first."""
    own_python = Path(sys.executable).resolve()
    own_paths = (Path(sys.base_prefix),)
    if not abi:
        return [_candidate(abi, "this user, unconfined", own_python, own_paths)]
    if os.geteuid() != 0:
        return [_candidate(abi, "this user", own_python, own_paths)]
    own_uid = "a user id per execution"
    return [
        _candidate(abi, own_uid, own_python, own_paths, is_own_uid=True),
        _candidate(abi, own_uid, SYSTEM_PYTHON, (), is_own_uid=True),
        _candidate(abi, "root without capabilities", own_python, own_paths),
    ]


def _candidate(
    abi: int,
    identity: str,
    python: Path,
    python_paths: tuple[Path, ...],
    *,
    is_own_uid: bool = False,
) -> _Candidate:
    confining = Confining(
        level=Level.LANDLOCK if abi else Level.NONE,
        abi=abi,
        is_own_uid=is_own_uid,
        is_root_dropped=bool(abi) and os.geteuid() == 0,
        is_filtered=bool(abi) and seccomp.is_supported(),
    )
    return _Candidate(
        confining=confining, identity=identity, python=python, python_paths=python_paths
    )


def _report(candidate: _Candidate, took_s: float) -> SandboxReport:
    confining = candidate.confining
    gaps: tuple[str, ...] = ("which host answers at the gateway's port",)
    gaps += landlock.missing(confining.abi)
    if not confining.is_filtered:
        gaps += ("UDP and unix sockets (no filter for this machine type)",)
    if not confining.is_own_uid:
        gaps += ("mode and owner changes of this user's other files",)
    if not is_task_bound_kept(0 if confining.is_own_uid else None):
        gaps += ("a process limit by the kernel (it is watched instead)",)
    return SandboxReport(
        level=confining.level,
        abi=confining.abi,
        identity=candidate.identity,
        python=candidate.python,
        python_paths=candidate.python_paths,
        not_enforced=gaps if confining.level is not Level.NONE else (UNCONFINED,),
        took_s=took_s,
    )
