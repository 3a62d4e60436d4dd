"""Opens what lies below a run: places to meet, the sandbox, the run folder, its journal.

Owns: the order of opening and closing. Must not know: the parts that run. Invariants: nothing is
written before the sandbox passed its self-test; a run that the user's input does not let start
leaves no folder.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from opengyre.config.root import RunConfig
from opengyre.harness.profiles import stage_agent
from opengyre.harness.selftest import OpenSandbox, open_sandbox
from opengyre.runtime.folders import meeting_places
from opengyre.runtime.prepare import Prepared
from opengyre.seams.errors import ConfigError, leaves
from opengyre.store.journal import Journal, open_journal
from opengyre.store.run_folder import RunFolder, create_run_folder


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """The parts of a run that last from its start to its end."""

    prepared: Prepared
    folder: RunFolder
    journal: Journal
    sandbox: OpenSandbox
    program: Path
    sockets: Path
    planes: Path
    work: Path
    clock: Clock

    @property
    def config(self) -> RunConfig:
        return self.prepared.config


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """What the shell logs goes to the run folder, not between the lines of a terminal view."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    root = logging.getLogger("opengyre")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        yield
    finally:
        root.propagate = True
        root.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def new_run_folder(path: Path, config: RunConfig) -> Iterator[RunFolder]:
    """Made whole; gone again if the user's input lets no process start. Raises ConfigError."""
    folder = create_run_folder(path, config.model_dump(mode="json"))
    try:
        yield folder
    except BaseException as error:
        if any(isinstance(leaf, ConfigError) for leaf in leaves(error)):
            shutil.rmtree(path, ignore_errors=True)
        raise


@contextlib.asynccontextmanager
async def open_run(
    prepared: Prepared, folder_path: Path, *, is_unsafe_allowed: bool
) -> AsyncIterator[OpenRun]:
    """Open what lies below a run. Raises ConfigError with nothing half-written."""
    clock = Clock()
    config = prepared.config
    async with contextlib.AsyncExitStack() as stack:
        sockets, planes, work = stack.enter_context(meeting_places())
        program = stage_agent(work / "agent")
        harness = () if prepared.program is None else prepared.program.all_paths
        readable = (program, *harness, *prepared.grader_files)
        sandbox = await stack.enter_async_context(
            open_sandbox(work, read_only_paths=readable, is_unsafe_allowed=is_unsafe_allowed)
        )
        folder = stack.enter_context(new_run_folder(folder_path, config))
        stack.enter_context(logging_to(folder.logs / "controller.log"))
        journal = await stack.enter_async_context(open_journal(folder.db))
        yield OpenRun(
            prepared=prepared,
            folder=folder,
            journal=journal,
            sandbox=sandbox,
            program=program,
            sockets=sockets,
            planes=planes,
            work=work,
            clock=clock,
        )
