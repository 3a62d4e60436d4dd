"""Executions shaped like those of long coding agents, drawn from a seed.

Owns: their shape. Sizes are in tokens of a real agent with a window of 128,000; `scale` of them
make one token here. Must not know: trees, models.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from opengyre.trajectory.turns import ForkReason, Role, SampledSpan, TurnTokens

VOCABULARY = 512
LOGPROB = -6.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pairs are (median, sigma) of a log-normal. A history above `compaction_tokens` is summed up
    and the main agent begins anew below its system prompt. Up to `max_sub_agents` (evenly drawn)
    each work below a prompt of their own; those called in one turn share it."""

    scale: int = 64
    num_turns: tuple[float, float] = (150, 0.8)
    sampled_tokens: tuple[float, float] = (200, 0.9)
    result_tokens: tuple[float, float] = (500, 1.2)
    system_tokens: int = 12_000
    task_tokens: int = 2_000
    compaction_tokens: int = 100_000
    summary_tokens: int = 1_500
    recalled_tokens: int = 6_000
    max_sub_agents: int = 6
    sub_system_tokens: int = 5_000
    sub_turns: tuple[float, float] = (18, 0.6)
    p_retry: float = 0.02
    p_side: float = 0.05
    p_rewrite: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call to be answered: what it keeps of `parent`'s line and how many tokens it adds."""

    parent: str = ""
    num_kept: int = 0
    num_new: int = 1
    num_sampled: int = 1
    role: Role = Role.MAIN
    reason: ForkReason = ForkReason.NONE


class Author:
    """Writes one execution's turns in the order in which they were made."""

    def __init__(self, shape: Shape, *, seed: int) -> None:
        self._shape = shape
        self._numbers = np.random.default_rng(seed)
        self._num_turns = 0
        self._ends: dict[str, int] = {}
        self._latest = ""

    def turns(self) -> Iterator[TurnTokens]:
        shape = self._shape
        num_turns = int(np.clip(self._drawn(shape.num_turns, 1), 10, 600))
        num_sub_agents = int(self._numbers.integers(shape.max_sub_agents + 1))
        called_in = self._numbers.integers(0, num_turns, num_sub_agents).tolist()
        for number in range(num_turns):
            yield from self._main_turn()
            main = self._latest
            self._latest = ""
            for _ in range(called_in.count(number)):
                yield from self._sub_agent(beside=self._latest)
            if self._numbers.random() < shape.p_side:
                yield self._answered(Call(num_new=self._scaled(600), role=Role.SIDE))
            self._latest = main

    def _main_turn(self) -> Iterator[TurnTokens]:
        shape = self._shape
        if not self._latest:
            yield self._answered(self._root(self._scaled(shape.system_tokens + shape.task_tokens)))
        elif self._ends[self._latest] > shape.compaction_tokens // shape.scale:
            yield from self._compaction()
        else:
            yield from self._next(Role.MAIN)

    def _compaction(self) -> Iterator[TurnTokens]:
        shape, last = self._shape, self._latest
        yield self._answered(
            Call(
                parent=last,
                num_kept=self._ends[last],
                num_new=self._scaled(400),
                num_sampled=self._scaled(shape.summary_tokens),
                role=Role.MAIN_SUMMARY,
            )
        )
        num_new = shape.task_tokens + shape.summary_tokens + shape.recalled_tokens
        root = self._root(self._scaled(num_new))
        num_kept = self._scaled(shape.system_tokens)
        yield self._answered(replace(root, parent=self._latest, num_kept=num_kept))

    def _sub_agent(self, *, beside: str) -> Iterator[TurnTokens]:
        num_system, num_task = (
            self._scaled(size) for size in (self._shape.sub_system_tokens, self._shape.task_tokens)
        )
        root = replace(self._root(num_system + num_task), role=Role.SUB_AGENT)
        if beside:
            root = replace(root, parent=beside, num_kept=num_system, num_new=num_task)
        yield self._answered(root)
        for _ in range(self._drawn(self._shape.sub_turns, 1)):
            yield from self._next(Role.SUB_AGENT)

    def _next(self, role: Role) -> Iterator[TurnTokens]:
        """A turn after the latest: now and then with another last answer, or sent twice."""
        shape = self._shape
        call = Call(
            parent=self._latest,
            num_kept=self._ends[self._latest],
            num_new=self._drawn(shape.result_tokens, shape.scale),
            num_sampled=self._drawn(shape.sampled_tokens, shape.scale),
            role=role,
        )
        if self._numbers.random() < shape.p_rewrite:
            kept = call.num_kept - 1
            call = replace(call, num_kept=kept, reason=ForkReason.REWRITTEN_TURN)
        turn = self._answered(call)
        if self._numbers.random() < shape.p_retry:
            yield replace(turn, is_committed=False)
            turn = replace(turn, attempt=1)
        yield turn

    def _root(self, num_new: int) -> Call:
        num_sampled = self._drawn(self._shape.sampled_tokens, self._shape.scale)
        return Call(num_new=num_new, num_sampled=num_sampled, reason=ForkReason.NEW_ROOT)

    def _answered(self, call: Call) -> TurnTokens:
        self._num_turns += 1
        ids = self._numbers.integers(0, VOCABULARY, call.num_new + call.num_sampled).tolist()
        self._latest = f"t{self._num_turns}"
        self._ends[self._latest] = call.num_kept + len(ids)
        return TurnTokens(
            turn=self._latest,
            attempt=0,
            parent=call.parent,
            fork_reason=call.reason,
            role=call.role,
            is_committed=True,
            num_kept_tokens=call.num_kept,
            new_prompt_ids=ids[: call.num_new],
            completion_ids=ids[call.num_new :],
            logprobs=[LOGPROB] * call.num_sampled,
            spans=(SampledSpan(start=0, end=call.num_sampled, version=0, engine="c0#1"),),
        )

    def _drawn(self, median_and_sigma: tuple[float, float], scale: int) -> int:
        median, sigma = median_and_sigma
        return max(1, round(self._numbers.lognormal(np.log(median), sigma) / scale))

    def _scaled(self, num_tokens: int) -> int:
        return max(1, num_tokens // self._shape.scale)
