"""A discrete-event kernel: a heap of actions with an insertion counter.

Owns: simulated time and the order of actions. Must not know: what an action does.
Invariants: time never goes back; actions of one moment run in the order they were set; the heap
holds at most `max_pending` live actions, and no more cancelled ones than live ones.
"""

import heapq
from collections.abc import Callable
from typing import NewType

from opengyre.control.errors import InvariantError

Token = NewType("Token", int)
Action = Callable[[], None]

MIN_SWEEP = 64


class Kernel:
    """Errors: InvariantError for a time in the past or a heap past its bound."""

    def __init__(self, *, max_pending: int = 10_000_000) -> None:
        self.now_s = 0.0
        self.num_run = 0
        self._max_pending = max_pending
        self._num_set = 0
        self._heap: list[tuple[float, Token]] = []
        self._actions: dict[Token, Action] = {}

    def at(self, time_s: float, action: Action) -> Token:
        """Run `action` when the time is `time_s`; the token cancels it."""
        if not time_s >= self.now_s:
            raise InvariantError(f"an action at {time_s} s, but it is {self.now_s} s")
        if len(self._actions) >= self._max_pending:
            raise InvariantError(f"more than {self._max_pending} actions are pending")
        self._num_set += 1
        token = Token(self._num_set)
        self._actions[token] = action
        heapq.heappush(self._heap, (time_s, token))
        return token

    def after(self, delay_s: float, action: Action) -> Token:
        return self.at(self.now_s + delay_s, action)

    def cancel(self, token: Token) -> None:
        """The action will not run; nothing happens if it has run or was cancelled before."""
        self._actions.pop(token, None)
        if len(self._heap) > 2 * len(self._actions) + MIN_SWEEP:
            self._heap = [entry for entry in self._heap if entry[1] in self._actions]
            heapq.heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """When the next action runs; None if nothing is set."""
        heap, actions = self._heap, self._actions
        while heap and heap[0][1] not in actions:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pass_to(self, time_s: float) -> None:
        """Time passes without an action; none may be due before `time_s`."""
        next_s = self.next_s
        if time_s < self.now_s or (next_s is not None and next_s < time_s):
            raise InvariantError(f"time cannot pass from {self.now_s} s to {time_s} s")
        self.now_s = time_s

    def run_next(self) -> None:
        """The next action, at its time. Raises InvariantError if nothing is set."""
        if self.next_s is None:
            raise InvariantError("nothing is set to happen")
        self.now_s, token = heapq.heappop(self._heap)
        self.num_run += 1
        self._actions.pop(token)()
