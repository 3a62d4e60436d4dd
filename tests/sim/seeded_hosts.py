"""Processes, threads and sockets of a seeded world, as asyncio asks a loop for them.

Owns: WorldLoop (executors, unix and TCP connections, child processes), kill and stop of a host.
Must not know: what a process runs; `programs` maps a module's name to its main. Invariants: work
of one executor runs in its order; a killed host runs nothing more and its exit is told once.
"""

import asyncio
import contextvars
import functools
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.sim.seeded_loop import HOST, Host, Mode, SeededLoop
from tests.sim.seeded_wire import MemoryServer, Net

KILLED = -9
Program = Callable[[str, str, int], Awaitable[None]]


class ChildProcess(asyncio.SubprocessTransport):
    """What a launcher holds of a process it started."""

    def __init__(self, loop: "WorldLoop", host: Host, incarnation: int) -> None:
        super().__init__()
        self.host = host
        self.incarnation = incarnation
        self._loop = loop
        self._returncode: int | None = None
        self._waiters: list[asyncio.Future[int]] = []

    def get_pid(self) -> int:
        return 1000 + self.incarnation

    def get_returncode(self) -> int | None:
        return self._returncode

    def get_pipe_transport(self, fd: int) -> None:
        return None

    def send_signal(self, signal: int) -> None:
        self._loop.kill_host(self.host)

    def kill(self) -> None:
        self._loop.kill_host(self.host)

    def terminate(self) -> None:
        self._loop.kill_host(self.host)

    def ended(self, returncode: int) -> None:
        """The exit notice; the one that started it learns it now."""
        if self._returncode is None:
            self._returncode = returncode
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(returncode)

    async def _wait(self) -> int:
        if self._returncode is not None:
            return self._returncode
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return await waiter


class Work:
    """One call in a thread: it takes effect when its time is over."""

    def __init__(
        self, loop: "WorldLoop", future: "asyncio.Future[Any]", call: "functools.partial[Any]"
    ) -> None:
        self.future = future
        self._loop = loop
        self._call = call
        self._context = contextvars.copy_context()

    def begin(self, queue: "deque[Work]") -> None:
        name = name_of_work(self._call)
        self._loop.before_work(name)
        delay_s = self._loop.delay_s(name)
        self._loop.call_later(delay_s, self._finish, name, queue, context=self._context)

    def _finish(self, name: str, queue: "deque[Work]") -> None:
        self._run(name)
        queue.popleft()
        while queue and queue[0].future.cancelled():
            queue.popleft()
        if queue:
            queue[0].begin(queue)

    def _run(self, name: str) -> None:
        try:
            result = self._call()
        except Exception as error:  # noqa: BLE001  told to whoever waits, as a thread pool does
            if not self.future.done():
                self.future.set_exception(error)
            return
        self._loop.on_work(name, self._call)
        if not self.future.done():
            self.future.set_result(result)


class WorldLoop(SeededLoop):
    """`delay_s(what)` says how long something takes; `programs` what a module name runs.
    `on_work(name)` is told when an executor ran something."""

    def __init__(self, *, seed: int, mode: Mode) -> None:
        super().__init__(seed=seed, mode=mode)
        self.delay_s: Callable[[str], float] = lambda what: 0.0
        self.on_work: Callable[[str, functools.partial[Any]], None] = lambda name, call: None
        self.before_work: Callable[[str], None] = lambda name: None
        self.on_kill: Callable[[Host], None] = lambda host: None
        self.net = Net(self, delay_s=lambda name: self.delay_s("wire"))
        self.programs: dict[str, Program] = {}
        self.children: dict[str, ChildProcess] = {}
        self.hosts: list[Host] = []
        self.killed: list[str] = []
        self.left_tasks: list[str] = []
        self._queues: dict[ThreadPoolExecutor, deque[Work]] = {}

    # ---- hosts

    def start_host(self, name: str, body: Callable[[], Awaitable[Any]]) -> Host:
        """Run `body` as a process of its own; it ends when `body` does."""
        host = Host(name)
        self.hosts.append(host)
        context = contextvars.copy_context()
        context.run(HOST.set, host)
        task = self.create_task(self._live(host, body), name=name, context=context)
        task.add_done_callback(_retrieve, context=contextvars.Context())
        return host

    def kill_host(self, host: Host, returncode: int = KILLED) -> None:
        """kill -9: it runs nothing more, its connections end."""
        if host.is_dead:
            return
        self.on_kill(host)
        host.is_dead = True
        host.is_stopped = False
        self._parked += host.waiting
        host.waiting.clear()
        host.death.set()
        self.net.drop_host(host)
        child = self.children.get(host.name)
        if child is not None and child.host is host:
            if returncode != 0:
                self.killed.append(f"{host.name}-{child.incarnation}")
            delay_s = self.delay_s("exit")
            self.call_later(delay_s, child.ended, returncode, context=contextvars.Context())

    def in_world(self, delay_s: float, action: Callable[[], None]) -> None:
        """Later, as nobody's callback."""
        self.call_later(delay_s, action, context=contextvars.Context())

    def stop_host(self, host: Host, duration_s: float) -> None:
        """As SIGSTOP; it goes on after `duration_s` if it lives then."""
        if not host.is_dead and not host.is_stopped:
            host.is_stopped = True
            self.call_later(duration_s, self.resume_host, host, context=contextvars.Context())

    async def all_dead(self) -> None:
        """Return when no host lives."""
        for host in self.hosts:
            await host.death.wait()

    async def _live(self, host: Host, body: Callable[[], Awaitable[Any]]) -> None:
        returncode = 1
        try:
            await body()
            returncode = 0
            self.left_tasks += self._tasks_of(host)
        finally:
            self.kill_host(host, returncode)

    def _tasks_of(self, host: Host) -> list[str]:
        """What still runs in a host that is about to end by itself. What never began to run (a
        connection that was taken in the last moment) holds nothing."""
        own = asyncio.current_task(self)
        left: list[Any] = [
            one.get_coro()
            for one in asyncio.all_tasks(self)
            if getattr(one, "host", None) is host and one is not own
        ]
        begun = [one for one in left if inspect.getcoroutinestate(one) != inspect.CORO_CREATED]
        return sorted(f"{host.name}: {one!r}"[:200] for one in begun)

    # ---- what asyncio asks of a loop

    async def subprocess_exec(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], program: Any, *args: Any, **how: Any
    ) -> tuple[ChildProcess, Any]:
        """`python -m module address name incarnation`."""
        module, address, name, incarnation = str(args[1]), str(args[2]), str(args[3]), int(args[4])
        protocol = protocol_factory()
        await asyncio.sleep(self.delay_s("start"))
        main = self.programs[module]
        context = contextvars.Context()
        host = context.run(self.start_host, name, lambda: main(address, name, incarnation))
        child = ChildProcess(self, host, incarnation)
        self.children[name] = child
        return child, protocol

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """A pool of one thread works in order; the default one begins everything at once."""
        work = Work(self, self.create_future(), functools.partial(func, *args))
        if isinstance(executor, ThreadPoolExecutor):
            queue = self._queues.setdefault(executor, deque())
            queue.append(work)
            if len(queue) == 1:
                work.begin(queue)
        else:
            work.begin(deque([work]))
        return work.future

    async def create_unix_connection(self, factory: Any, path: Any = None, **how: Any) -> Any:  # type: ignore[override]
        return await self.net.connect(str(path), factory)

    async def create_unix_server(self, factory: Any, path: Any = None, **how: Any) -> MemoryServer:  # type: ignore[override]
        Path(path).touch()  # noqa: ASYNC240  a name for the server to protect, as a socket is
        return self.net.listen(str(path), factory)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **how: Any
    ) -> Any:
        return await self.net.connect(f"{host}:{port}", factory)

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **how: Any):  # type: ignore[no-untyped-def,override]
        sock = how["sock"]
        place = "{}:{}".format(*sock.getsockname()[:2])
        return self.net.listen(place, factory, sock)


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """A program that failed is a process that ended badly, no error of the loop."""
    if not task.cancelled():
        task.exception()


def name_of_work(func: Any) -> str:
    """The name of what runs, below partials and `Context.run`."""
    while isinstance(func, functools.partial):
        is_in_context = isinstance(getattr(func.func, "__self__", None), contextvars.Context)
        func = func.args[0] if is_in_context else func.func
    return str(getattr(func, "__name__", type(func).__name__))
