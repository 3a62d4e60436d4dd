"""Random executions with every way in which a turn can go on from another."""

from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from opengyre.trajectory.bundles import Row
from opengyre.trajectory.selection import Selection, SelectionSettings, select
from opengyre.trajectory.tree import Node, Tree, line_ids
from opengyre.trajectory.turns import TRAINED_ROLES, ForkReason, Role, SampledSpan, TurnTokens

LogprobsOf = Callable[[Sequence[int]], Sequence[float]]
"""Sampling logprobs along a line of ids, shape [T]; the first is not looked at."""


class Start(StrEnum):
    """Where a turn leaves its parent's line."""

    WHOLE = "whole"
    IN_SAMPLED = "in_sampled"
    IN_INJECTED = "in_injected"
    SAME_PROMPT = "same_prompt"
    ABOVE = "above"
    ROOT = "root"


def constant_logprobs(ids: Sequence[int]) -> Sequence[float]:
    return [-0.5] * len(ids)


class Grower:
    """Adds turns to `tree`. All draws come from `numbers`."""

    def __init__(
        self,
        numbers: np.random.Generator,
        *,
        vocabulary: int = 40,
        logprobs_of: LogprobsOf = constant_logprobs,
    ) -> None:
        self.tree = Tree()
        self._numbers = numbers
        self._vocabulary = vocabulary
        self._logprobs_of = logprobs_of

    def add(
        self,
        parent: Node | None,
        start: Start,
        *,
        num_injected: int,
        num_sampled: int,
        role: Role = Role.MAIN,
    ) -> Node:
        """One committed turn. ROOT, or nothing kept, takes no parent."""
        num_kept = 0 if parent is None else self._num_kept(parent, start)
        if num_kept == 0:
            parent = None
        before = [] if parent is None else line_ids(parent)[:num_kept].tolist()
        new = self._numbers.integers(0, self._vocabulary, num_injected + num_sampled).tolist()
        logprobs = self._logprobs_of([*before, *new])
        return self.tree.insert(
            TurnTokens(
                turn=f"e1.t{len(self.tree.nodes) + 1}",
                attempt=0,
                parent="" if parent is None else parent.turn,
                fork_reason=ForkReason.NONE,
                role=role,
                is_committed=True,
                num_kept_tokens=num_kept,
                new_prompt_ids=new[:num_injected],
                completion_ids=new[num_injected:],
                logprobs=logprobs[len(logprobs) - num_sampled :],
                spans=(SampledSpan(start=0, end=num_sampled, version=0, engine="c0#1"),),
            )
        )

    def _num_kept(self, parent: Node, start: Start) -> int:
        match start:
            case Start.WHOLE:
                return parent.end
            case Start.IN_SAMPLED:
                return self._between(parent.sampled_begin, parent.end)
            case Start.IN_INJECTED:
                return self._between(parent.begin, parent.sampled_begin)
            case Start.SAME_PROMPT:
                return parent.sampled_begin
            case Start.ABOVE:
                return self._between(0, parent.begin)
            case Start.ROOT:
                return 0

    def _between(self, low: int, high: int) -> int:
        return int(self._numbers.integers(low, high + 1))


def random_tree(
    numbers: np.random.Generator,
    *,
    num_turns: int,
    max_tokens: int = 6,
    logprobs_of: LogprobsOf = constant_logprobs,
) -> Tree:
    """Mostly turns that go on from the last one; up to `max_tokens` new ids of each kind."""
    grower = Grower(numbers, logprobs_of=logprobs_of)
    starts = [Start.WHOLE] * 4 + list(Start)
    for _ in range(num_turns):
        nodes = grower.tree.nodes
        is_last = not nodes or numbers.random() < 0.5
        parent = nodes[-1 if is_last else numbers.integers(len(nodes))] if nodes else None
        start = Start(starts[numbers.integers(len(starts))])
        node = grower.add(
            parent,
            start,
            num_injected=0 if start is Start.SAME_PROMPT else int(numbers.integers(max_tokens)),
            num_sampled=int(numbers.integers(max_tokens + 1)),
            role=TRAINED_ROLES[numbers.integers(len(TRAINED_ROLES))],
        )
        node.is_committed = bool(numbers.random() < 0.9)
    return grower.tree


def random_selection(tree: Tree, numbers: np.random.Generator, *, max_paths: int = 0) -> Selection:
    return select(tree, settings=SelectionSettings(max_paths=max_paths), rng=numbers)


def rows_of(selection: Selection, *, execution: str = "e1", advantage: float = 1.0) -> list[Row]:
    return [
        Row(
            group="g",
            execution=execution,
            path=path,
            advantage=advantage,
            num_execution_tokens=selection.account.trained,
            is_counted_only=False,
        )
        for path in selection.paths
    ]
