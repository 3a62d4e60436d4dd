"""Executions on an engine: a virtual clock that runs at the engine's speed.

Owns: who works where and when the next one is finished. Must not know: why anybody moves.
Invariants: a change costs O(log n) for n executions of the engine and nothing for other engines;
the work of an execution is what it was drawn with plus its stalls.
"""

import heapq
from dataclasses import dataclass, field

from opengyre.control.ids import EngineId, ExecutionId
from opengyre.simulate.costs import EngineCosts, ToolCosts
from opengyre.simulate.workload import Draw

MIN_SWEEP = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One execution. `owed_s`: all its work, stalls included; `left_s` of it are left when it is
    on no engine. `finish_s`: the virtual time of its end on an engine. `num_asked` counts the
    draws of its place in a turn."""

    execution: ExecutionId
    number: int
    draw: Draw
    group: int
    owed_s: float
    left_s: float
    engine: "RolloutEngine | None" = None
    finish_s: float = 0.0
    stamp: int = 0
    num_asked: int = 0
    displaced_s: float | None = None
    is_sampling: bool = True
    tool_left_s: float = 0.0

    @property
    def worked_s(self) -> float:
        """Of an execution that is on no engine."""
        return self.owed_s - self.left_s


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutEngine:
    """`virtual_s` is right at `settled_s`. `shut_until_s`: when its door opens again.
    `prefill_free_s`, `link_free_s`: when its recompute and its KV link are free again.
    `progress_s`: execution-seconds worked here."""

    engine: EngineId
    devices: int
    slots: int
    costs: EngineCosts
    tools: ToolCosts
    live: dict[ExecutionId, Work] = field(default_factory=dict)
    virtual_s: float = 0.0
    settled_s: float = 0.0
    speed: float = 1.0
    shut_until_s: float = 0.0
    prefill_free_s: float = 0.0
    link_free_s: float = 0.0
    progress_s: float = 0.0
    num_stamps: int = 0
    heap: list[tuple[float, int, Work]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._set_speed()

    def settle(self, now_s: float) -> None:
        """Work until now at the speed so far."""
        gained_s = (now_s - self.settled_s) * self.speed
        self.virtual_s += gained_s
        self.progress_s += gained_s * len(self.live)
        self.settled_s = now_s

    def add(self, work: Work, now_s: float) -> None:
        """It works here from now on, with `left_s` to go."""
        self.settle(now_s)
        self.live[work.execution] = work
        work.engine = self
        self._set_finish(work, self.virtual_s + work.left_s)
        self._set_speed()

    def remove(self, work: Work, now_s: float) -> None:
        """It works on no engine from now on."""
        self.settle(now_s)
        del self.live[work.execution]
        work.left_s = max(0.0, work.finish_s - self.virtual_s)
        work.engine = None
        work.stamp = -1
        self._set_speed()

    def stall(self, work: Work, stall_s: float) -> None:
        """Its end is `stall_s` later; the engine is settled."""
        extra_s = stall_s * self.speed
        work.owed_s += extra_s
        self._set_finish(work, work.finish_s + extra_s)

    def left_of(self, work: Work) -> float:
        """Seconds of work left; the engine is settled."""
        return work.finish_s - self.virtual_s

    def next_finish(self) -> tuple[float, Work] | None:
        """When the next one ends if nothing changes, and which."""
        heap = self.heap
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        if not heap:
            return None
        finish_s, _, work = heap[0]
        left_s = max(0.0, finish_s - self.virtual_s)
        return self.settled_s + left_s / self.speed, work

    def prefill_s(self, tokens: float) -> float:
        """Seconds in which all devices together recompute `tokens`."""
        return tokens / (self.costs.prefill_tokens_per_s * self.devices)

    def prefill(self, tokens: float, from_s: float) -> float:
        """When `tokens` of context are recomputed, after those asked for before."""
        start_s = max(self.prefill_free_s, from_s)
        self.prefill_free_s = start_s + self.prefill_s(tokens)
        return self.prefill_free_s

    def read_kv(self, tokens: float, from_s: float) -> float:
        """When the blocks of `tokens` have been read, after those asked for before."""
        start_s = max(self.link_free_s, from_s)
        self.link_free_s = start_s + tokens / (self.costs.kv_move_tokens_per_s * self.devices)
        return self.link_free_s

    def _set_finish(self, work: Work, finish_s: float) -> None:
        self.num_stamps += 1
        work.finish_s, work.stamp = finish_s, self.num_stamps
        heapq.heappush(self.heap, (finish_s, work.stamp, work))
        if len(self.heap) > 2 * len(self.live) + MIN_SWEEP:
            self.heap = [entry for entry in self.heap if self._is_current(entry)]
            heapq.heapify(self.heap)

    def _is_current(self, entry: tuple[float, int, Work]) -> bool:
        return entry[2].engine is self and entry[2].stamp == entry[1]

    def _set_speed(self) -> None:
        share = self.tools.share
        if self.costs.load_slope > 0:
            sampling = self.costs.speed(len(self.live) / self.slots)
            self.speed = 1.0 / (share + (1.0 - share) / sampling)
