"""Running an agent program: what is launched, under which limits, and how it ended.

Implementations of Sandbox: Landlock, and `none` (refused unless the user insists). Of Harness:
whatever a profile describes (harness.profiles). Must not know: models, groups, verdicts.
Invariants: every launch gets exactly one LaunchResult, and when it is there no process of the
launch is left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

HeldClock = Callable[[], float]
"""Seconds for which this launch was held by us so far (one that lasts counts up to now)."""


def never_held() -> float:
    return 0.0


class Level(StrEnum):
    """How a launch is confined."""

    LANDLOCK = "landlock"
    NONE = "none"


class Ending(StrEnum):
    """Why a launch ended. The last two are our fault, never the agent's."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    OUTPUT_LIMIT = "output_limit"
    MEMORY_LIMIT = "memory_limit"
    PROCESS_LIMIT = "process_limit"
    NOT_STARTED = "not_started"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one launch. `wall_s` does not count time in which we held it.

    `memory_bytes` bounds the writable memory of each process and the resident memory of all of
    them together; `file_size_bytes` each file; `output_bytes` stdout and stderr together;
    `grace_s` is the time between SIGTERM and SIGKILL when we end it.
    """

    wall_s: float = 600.0
    memory_bytes: int = 2 << 30
    output_bytes: int = 16 << 20
    num_processes: int = 128
    num_open_files: int = 1024
    file_size_bytes: int = 1 << 30
    grace_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One program to run. All paths are absolute and exist; writing is allowed below `workspace`
    and `private_tmp` only, reading also below `read_only_paths` and the system folders.

    `env` is all the program gets beside PATH, HOME, TMPDIR and LANG. `gateway_port` is the one
    TCP port it may connect to (at any host: Landlock knows no addresses); None: no network.
    """

    execution: str
    argv: tuple[str, ...]
    workspace: Path
    private_tmp: Path
    env: Mapping[str, str] = field(default_factory=dict)
    read_only_paths: tuple[Path, ...] = ()
    gateway_port: int | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended. `exit_code` is set with EXITED, `signal` with SIGNALLED.

    `output_tail` is the end of stdout and stderr as one text, invalid UTF-8 replaced; `reason`
    is words for the journal. `wall_s` runs from the launch until nothing of it was left.
    """

    ending: Ending
    exit_code: int | None
    signal: int | None
    output_tail: str
    num_output_bytes: int
    wall_s: float
    reason: str

    @property
    def is_timed_out(self) -> bool:
        return self.ending is Ending.TIMED_OUT

    @property
    def is_output_truncated(self) -> bool:
        return self.num_output_bytes > len(self.output_tail.encode())

    @property
    def is_our_fault(self) -> bool:
        """True when the program never ran or its watcher was lost: it may be launched again."""
        return self.ending in (Ending.NOT_STARTED, Ending.LOST)


class Sandbox(Protocol):
    async def run(
        self,
        spec: LaunchSpec,
        *,
        held_s: HeldClock = never_held,
        stop: asyncio.Event | None = None,
    ) -> LaunchResult:
        """Run `spec` to its end: its own, its deadline's, or CANCELLED once `stop` is set.

        Returns when nothing of the launch is left; a program that cannot be started is a result
        too (NOT_STARTED). If the awaiting task is cancelled, the launch is ended first. Raises
        BoundaryError("sandbox") if launching as such is impossible.
        """
        ...


RunConfined = Callable[[LaunchSpec], Awaitable[LaunchResult]]
"""`Sandbox.run`, as parts see it that must not know sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessJob:
    """What a harness is told: an instruction, a place to work in, and where the model answers.

    `base_url` is the execution's own URL (with its /v1), `private_tmp` exists and is empty.
    """

    execution: str
    instruction: str
    workspace: Path
    private_tmp: Path
    base_url: str
    api_key: str
    model: str
    limits: Limits = field(default_factory=Limits)


class Harness(Protocol):
    @property
    def name(self) -> str: ...

    def prepare(self, job: HarnessJob) -> LaunchSpec:
        """Write what the program needs below `job.private_tmp` and say how to launch it."""
        ...
