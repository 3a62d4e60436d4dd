"""The same scenario under several seeds, in at most two processes.

Owns: which run goes to which process, and the end of those processes. Must not know: what a
result means. Invariants: results come in the order asked for and do not depend on the number of
processes; a lane is kept for the first seed of each scenario only; no process outlives this one or
the `with` block, however either ends.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from opengyre.seams.errors import BoundaryError
from opengyre.simulate.result import Result
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.world import simulate

MAX_PROCESSES = 2

Job = tuple[Scenario, int, bool]


class Repeater:
    """Runs scenarios; as a context manager it keeps its processes between calls."""

    def __init__(self, num_processes: int = MAX_PROCESSES) -> None:
        self._num_processes = min(num_processes, MAX_PROCESSES)
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline: Connection | None = None

    def __enter__(self) -> Self:
        if self._num_processes > 1:
            context = get_context("spawn")
            held, self._lifeline = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self._num_processes,
                mp_context=context,
                initializer=_hold,
                initargs=(held,),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None and self._lifeline is not None:
            if error is not None:
                self._lifeline.close()
            self._pool.shutdown(cancel_futures=True)
            self._lifeline.close()
            self._pool = None

    def run(self, scenarios: Sequence[Scenario], seeds: range) -> list[list[Result]]:
        """Every scenario under every seed: results[scenario][place of the seed].

        Raises BoundaryError if one of the processes died.
        """
        num_seeds = len(seeds)
        jobs = [(one, seed, seed == seeds[0]) for one in scenarios for seed in seeds]
        flat = list(self._map(jobs))
        return [flat[at : at + num_seeds] for at in range(0, len(flat), num_seeds)]

    def _map(self, jobs: Sequence[Job]) -> Iterable[Result]:
        if self._pool is None or len(jobs) == 1:
            return map(_run_one, jobs)
        return self._map_in_pool(self._pool, jobs)

    def _map_in_pool(self, pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> Iterator[Result]:
        try:
            with _no_interrupts():
                results = pool.map(_run_one, jobs, chunksize=1)
            yield from results
        except BrokenProcessPool as error:
            raise BoundaryError(
                "simulation", "a process of it was killed; is there enough memory?", retryable=True
            ) from error


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes and threads begun in here never see Ctrl-C: it reaches the main thread, later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hold(lifeline: Connection) -> None:
    """In a process of the pool: end as soon as the other end of `lifeline` is closed."""

    def wait() -> None:
        lifeline.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


def _run_one(job: Job) -> Result:
    scenario, seed, has_lanes = job
    result = simulate(scenario, seed)
    return result if has_lanes else replace(result, lanes=())
