"""The controller's side of launching: orders to supervisors, deadlines, results.

Owns the fork server, the user ids launches run under, and each launch's clock. Must not know
what a harness says or what a verdict is. Invariants: one LaunchResult per launch, given after
the supervisor said that nothing is left; a launch whose clock stands still never times out.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from opengyre.harness.confine import Confinement
from opengyre.harness.supervisor import END_TREE_S, LENGTH, MAX_ORDER_BYTES, STOP, Order, Report
from opengyre.seams.errors import BoundaryError
from opengyre.seams.harness import (
    Ending,
    HeldClock,
    LaunchResult,
    LaunchSpec,
    Level,
    never_held,
)

UIDS = range(61184, 65520)
"""Ids that are given to no account: the range systemd keeps for passing users."""
SERVER_END_S = 20.0
ANSWER_MARGIN_S = 10.0
PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
START_SERVER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from opengyre.harness.forkserver import main; main()"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Confining:
    """How this machine confines launches; found once, at the start (see selftest)."""

    level: Level
    abi: int
    is_own_uid: bool
    is_root_dropped: bool
    is_filtered: bool


class ForkServer:
    """The process that forks supervisors; started again if it died."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._door: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def send(self, channel: socket.socket) -> None:
        """A supervisor gets `channel`. Raises BoundaryError if none can be forked."""
        for attempt in (1, 2):
            door = await self._open_door()
            try:
                socket.send_fds(door, [b"+"], [channel.fileno()])
            except OSError as error:
                await self.close()
                if attempt == 2:
                    raise BoundaryError(
                        "sandbox", f"fork server: {error}", retryable=True
                    ) from error
            else:
                return

    async def close(self) -> None:
        """Every launch ends, then the process; killed if it takes longer than its budget."""
        door, process = self._door, self._process
        self._door = self._process = None
        if door is not None:
            door.close()
        if process is None:
            return
        try:
            async with asyncio.timeout(SERVER_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _open_door(self) -> socket.socket:
        async with self._starting:
            if self._door is None:
                mine, theirs = socket.socketpair()
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", "-S", "-c", START_SERVER, PACKAGE_ROOT),
                        stdin=theirs.fileno(),
                        start_new_session=True,
                    )
                self._door = mine
            return self._door


class LocalSandbox:
    """Launches on this machine (seams.harness.Sandbox)."""

    def __init__(self, confining: Confining, server: ForkServer) -> None:
        self.confining = confining
        self._server = server
        first = (os.getpid() * 61) % len(UIDS)
        self._free_uids = deque((*UIDS[first:], *UIDS[:first]))

    async def run(
        self,
        spec: LaunchSpec,
        *,
        held_s: HeldClock = never_held,
        stop: asyncio.Event | None = None,
    ) -> LaunchResult:
        uid = self._free_uids.popleft() if self.confining.is_own_uid else None
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                await self._server.send(theirs)
            order = _order(spec, self.confining, uid)
            return await _Launch(spec, held_s=held_s, stop=stop).follow(mine, order)
        finally:
            mine.close()
            if uid is not None:
                self._free_uids.append(uid)


class _Launch:
    """The clock of one launch, and its conversation with its supervisor."""

    def __init__(self, spec: LaunchSpec, *, held_s: HeldClock, stop: asyncio.Event | None) -> None:
        self._spec = spec
        self._held_s = held_s
        self._stop = stop or asyncio.Event()
        self._cause: Ending | None = None

    async def follow(self, channel: socket.socket, order: Order) -> LaunchResult:
        started_s = time.monotonic()
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            body = json.dumps(dataclasses.asdict(order)).encode()
            if len(body) > MAX_ORDER_BYTES:
                return self._lost("the launch order is too large", started_s)
            writer.write(LENGTH.pack(len(body)) + body)
            report = await self._converse(reader, writer, started_s)
        except TimeoutError:
            return self._lost("its supervisor does not answer", started_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._lost("its supervisor died", started_s)
        finally:
            writer.close()
        return self._result(report, started_s)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, started_s: float
    ) -> Report:
        """The report; asked for when the deadline passes, `stop` is set or we are cancelled."""
        stopper = asyncio.create_task(self._await_cause(started_s))
        reading = asyncio.create_task(_read_report(reader))
        try:
            await asyncio.wait({stopper, reading}, return_when=asyncio.FIRST_COMPLETED)
            if stopper.done():
                stopper.result()
            return await self._last_words(reading, writer)
        except asyncio.CancelledError:
            self._cause = Ending.CANCELLED
            await self._last_words(reading, writer)
            raise
        finally:
            stopper.cancel()
            reading.cancel()

    async def _last_words(
        self, reading: "asyncio.Task[Report]", writer: asyncio.StreamWriter
    ) -> Report:
        if not reading.done():
            writer.write(STOP)
        async with asyncio.timeout(self._spec.limits.grace_s + END_TREE_S + ANSWER_MARGIN_S):
            return await reading

    async def _await_cause(self, started_s: float) -> None:
        """Until `stop` or the deadline, which moves while we hold the launch."""
        while True:
            deadline_s = started_s + self._spec.limits.wall_s + self._held_s()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._cause = Ending.TIMED_OUT
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._stop.wait()
                    self._cause = Ending.CANCELLED
                    return

    def _result(self, report: Report, started_s: float) -> LaunchResult:
        ending, reason = report.ending, report.reason
        if ending == "stopped":
            ending = self._cause or Ending.CANCELLED
            reason = (
                f"ran longer than {self._spec.limits.wall_s} s"
                if (ending is Ending.TIMED_OUT)
                else "cancelled"
            )
        return LaunchResult(
            ending=Ending(ending),
            exit_code=report.exit_code,
            signal=report.signal,
            output_tail=report.output_tail,
            num_output_bytes=report.num_output_bytes,
            wall_s=time.monotonic() - started_s,
            reason=reason,
        )

    def _lost(self, reason: str, started_s: float) -> LaunchResult:
        return self._result(Report(ending=Ending.LOST, reason=reason), started_s)


async def _read_report(reader: asyncio.StreamReader) -> Report:
    (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    fields: dict[str, Any] = json.loads(await reader.readexactly(num_bytes))
    return Report(**fields)


def _order(spec: LaunchSpec, confining: Confining, uid: int | None) -> Order:
    limits = spec.limits
    writable = (str(spec.workspace), str(spec.private_tmp))
    base_env = {
        "PATH": PROGRAM_PATH,
        "HOME": str(spec.private_tmp),
        "TMPDIR": str(spec.private_tmp),
        "LANG": "C.UTF-8",
    }
    return Order(
        argv=spec.argv,
        env={**base_env, **spec.env},
        folder=str(spec.workspace),
        owned_paths=writable,
        confinement=Confinement(
            abi=confining.abi,
            uid=uid,
            is_root_dropped=confining.is_root_dropped,
            is_filtered=confining.is_filtered,
            read_paths=tuple(str(path) for path in spec.read_only_paths),
            write_paths=writable,
            connect_ports=() if spec.gateway_port is None else (spec.gateway_port,),
            memory_bytes=limits.memory_bytes,
            file_size_bytes=limits.file_size_bytes,
            num_open_files=limits.num_open_files,
            num_processes=limits.num_processes,
        ),
        output_bytes=limits.output_bytes,
        grace_s=limits.grace_s,
    )
