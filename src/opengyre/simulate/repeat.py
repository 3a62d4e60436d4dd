"""The same scenario under several seeds, in at most two processes.

Owns: which run goes to which process. Must not know: what a result means.
Invariants: results come in the order asked for and do not depend on the number of processes; a
lane is kept for the first seed of each scenario only.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import TracebackType
from typing import Self

from opengyre.simulate.result import Result
from opengyre.simulate.scenario import Scenario
from opengyre.simulate.world import simulate

MAX_PROCESSES = 2


class Repeater:
    """Runs scenarios; as a context manager it keeps its processes between calls."""

    def __init__(self, num_processes: int = MAX_PROCESSES) -> None:
        self._num_processes = min(num_processes, MAX_PROCESSES)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._num_processes > 1:
            self._pool = ProcessPoolExecutor(self._num_processes, mp_context=get_context("spawn"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(self, scenarios: Sequence[Scenario], seeds: range) -> list[list[Result]]:
        """Every scenario under every seed: results[scenario][place of the seed]."""
        num_seeds = len(seeds)
        jobs = [(one, seed, seed == seeds[0]) for one in scenarios for seed in seeds]
        flat = list(self._map(jobs))
        return [flat[at : at + num_seeds] for at in range(0, len(flat), num_seeds)]

    def _map(self, jobs: Sequence[tuple[Scenario, int, bool]]) -> Iterable[Result]:
        if self._pool is None or len(jobs) == 1:
            return map(_run_one, jobs)
        return self._pool.map(_run_one, jobs, chunksize=1)


def _run_one(job: tuple[Scenario, int, bool]) -> Result:
    scenario, seed, has_lanes = job
    result = simulate(scenario, seed)
    return result if has_lanes else replace(result, lanes=())
