"""Starts and ends our own processes on this host. Placement and exit notices, nothing else.

Invariants: a child dies with its parent (PDEATHSIG); one torch thread per process; an exit is
told exactly once; `end_all` leaves nothing behind within its budget.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Called first in a child's main: its end follows its parent's, kill -9 included."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        sys.exit(1)


def run_and_end(main: Callable[[], None]) -> NoReturn:
    """Run a child's `main`, then end the process: torch takes seconds to leave an interpreter, in
    which one that failed would not be seen as dead."""
    code = 1
    try:
        main()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        logging.shutdown()
        os._exit(code)


class LocalLauncher:
    """`start` a module as a process; `on_exit(name, incarnation, returncode)` when it is gone."""

    def __init__(self, log_dir: Path, on_exit: Callable[[str, int, int], None]) -> None:
        self._log_dir = log_dir
        self._on_exit = on_exit
        self._processes: dict[tuple[str, int], asyncio.subprocess.Process] = {}
        self._watchers: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def start(
        self, name: str, incarnation: int, module: str, address: str, *, fds: tuple[int, ...] = ()
    ) -> int:
        """Returns the pid. The child inherits `fds`, connects to `address` and says who it is."""
        environment = dict(os.environ)
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        log_path = self._log_dir / f"{name}-{incarnation}.log"
        with log_path.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, address, name, str(incarnation)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
                pass_fds=fds,
            )
        key = (name, incarnation)
        self._processes[key] = process
        self._watchers[key] = asyncio.create_task(self._watch(key, process))
        return process.pid

    def kill(self, name: str, incarnation: int) -> None:
        process = self._processes.get((name, incarnation))
        if process is not None and process.returncode is None:
            process.kill()

    async def end_all(self, grace_s: float) -> None:
        """Wait for children that were told to quit, then TERM, then KILL."""
        for step_signal in (None, signal.SIGTERM, signal.SIGKILL):
            living = [p for p in self._processes.values() if p.returncode is None]
            if not living:
                break
            if step_signal is not None:
                log.warning("%d processes did not end in time; %s", len(living), step_signal.name)
                for process in living:
                    process.send_signal(step_signal)
            waits = [asyncio.ensure_future(process.wait()) for process in living]
            await asyncio.wait(waits, timeout=grace_s)
        if self._watchers:
            await asyncio.wait(self._watchers.values(), timeout=grace_s)

    async def _watch(self, key: tuple[str, int], process: asyncio.subprocess.Process) -> None:
        returncode = await process.wait()
        del self._processes[key]
        self._on_exit(*key, returncode)
