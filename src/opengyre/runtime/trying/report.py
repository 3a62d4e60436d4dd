"""What `gyre harness try` says of an execution, and whether it counts as valid.

Owns: the figures and the judgement. Must not know: how it was run. Invariant: all figures come from
the gateway's records and the grader, none from what the harness printed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opengyre.control.facts import Outcome
from opengyre.runtime.executions import outcome_of
from opengyre.runtime.trying.execution import Played
from opengyre.seams.records import TokenRecord
from opengyre.store.trees import tree_of
from opengyre.trajectory.selection import Selection, SelectionSettings, select
from opengyre.trajectory.tree import Fork, Tree

PLAIN = (Fork.ROOT, Fork.CONTINUED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TryReport:
    """`turns_by_role` counts committed turns; a path is a line of turns that is trained as one;
    `problems` are sentences, none if it is valid."""

    harness: str
    outcome: str
    reason: str
    exit_code: int | None
    wall_s: float
    reward: float | None
    verdict: str
    protocols: tuple[str, ...]
    num_requests: int
    num_committed_turns: int
    turns_by_role: dict[str, int]
    forks: dict[str, int]
    num_paths: int
    num_sampled_tokens: int
    num_trainable_tokens: int
    problems: tuple[str, ...]
    output_tail: str

    @property
    def is_valid(self) -> bool:
        return not self.problems


def report_of(
    harness: str, played: Played, records: Sequence[TokenRecord], *, must_solve: bool
) -> TryReport:
    """`must_solve`: a reward of less than 1 is a problem, because the policy knew the solution."""
    turns = [record.header for record in records]
    committed = [turn for turn in turns if turn.is_committed]
    tree = tree_of(records)
    selection = _all_paths(tree)
    account = selection.account
    result, verdict = played.result, played.verdict
    problems = []
    if outcome_of(result) is not Outcome.COMPLETED:
        problems.append(f"it ended as {outcome_of(result).value}: {result.reason}")
    if not account.trained:
        problems.append("no token of it can be trained: it made no call that was answered in full")
    if verdict.reward is None:
        problems.append(f"no verdict: {verdict.reason}")
    elif must_solve and verdict.reward < 1:
        problems.append(f"the known solution got a reward of {verdict.reward:g}")
    return TryReport(
        harness=harness,
        outcome=outcome_of(result).value,
        reason=result.reason,
        exit_code=result.exit_code,
        wall_s=round(result.wall_s, 3),
        reward=verdict.reward,
        verdict=verdict.reason,
        protocols=tuple(sorted({turn.protocol for turn in turns})),
        num_requests=len(turns),
        num_committed_turns=len(committed),
        turns_by_role=dict(Counter(turn.role for turn in committed)),
        forks=dict(Counter(node.fork.value for node in tree.nodes if node.fork not in PLAIN)),
        num_paths=len(selection.paths),
        num_sampled_tokens=account.sampled,
        num_trainable_tokens=account.trained,
        problems=tuple(problems),
        output_tail=result.output_tail,
    )


def _all_paths(tree: Tree) -> Selection:
    settings = SelectionSettings(max_paths=0)
    return select(tree, settings=settings, rng=np.random.default_rng(0))
