"""An execution's tree, and a run's executions, as plain values for JSON and tables.

Owns: keys. Must not know: files, terminals.
"""

from collections.abc import Iterable
from typing import Any

from opengyre.trajectory.account import TokenAccount
from opengyre.views.tables import execution_fields, turn_cells
from opengyre.views.trees import ExecutionTree, NodeEnd


def tree_fields(tree: ExecutionTree) -> dict[str, Any]:
    """Everything about one execution: `turns` in the order in which they were told, `tree` one
    entry for each attempt, `parent` its parent's `index`."""
    return {
        **execution_fields(tree.one),
        "step": tree.step,
        "advantage": tree.advantage,
        "problem": tree.problem,
        "forks": tree.forks,
        "tokens": account_fields(tree.account),
        "turns": [turn_cells(end.record) for end in tree.ends],
        "tree": [_node_fields(end) for end in tree.ends],
    }


def account_fields(account: TokenAccount) -> dict[str, Any]:
    return {
        "sampled": account.sampled,
        "trained": account.trained,
        "masked": dict(account.masked),
        "dropped": dict(account.dropped),
    }


def execution_cells(tree: ExecutionTree) -> dict[str, Any]:
    """One line of the table of executions."""
    one, account = tree.one, tree.account
    return {
        "execution": one.execution,
        "group": one.group or "eval",
        "task": one.task,
        "step": tree.step,
        "outcome": "open" if one.outcome is None else one.outcome.value,
        "reward": _rounded(one.reward),
        "shaped": None if one.group is None else _rounded(one.value),
        "advantage": _rounded(tree.advantage),
        "turns": tree.num_turns,
        "forks": "broken" if tree.problem else _forks(tree),
        "sampled": account.sampled,
        "trained": account.trained,
        "masked": sum(account.masked.values()),
        "dropped": sum(account.dropped.values()),
    }


def _forks(tree: ExecutionTree) -> str:
    return ", ".join(f"{num} {name}" for name, num in tree.forks.items()) or "-"


def chosen(
    trees: Iterable[ExecutionTree],
    *,
    group: str = "",
    step: int | None = None,
    best: int = 0,
    worst: int = 0,
) -> list[ExecutionTree]:
    """Those of `group` and of `step` if given; of these the `best` or `worst` by raw reward, equal
    ones in dispatch order. An execution without a verdict is neither."""
    found = [
        tree
        for tree in trees
        if group in ("", tree.one.group) and (step is None or tree.step == step)
    ]
    if not best and not worst:
        return found
    valid = [(tree.one.reward, tree) for tree in found if tree.one.reward is not None]
    valid.sort(key=lambda pair: -pair[0] if best else pair[0])
    return [tree for _, tree in valid[: best or worst]]


def _node_fields(end: NodeEnd) -> dict[str, Any]:
    node = end.node
    return {
        "index": node.index,
        "turn": node.turn,
        "attempt": node.attempt,
        "role": node.role.value,
        "fork": node.fork.value,
        "parent": None if node.parent is None else node.parent.index,
        "kept": node.begin,
        "injected": node.num_injected,
        "sampled": node.num_sampled,
        "trained": [list(one) for one in end.trained],
        "reason": end.reason,
        "is_dropped": end.is_dropped,
        "launch": node.launch,
        "is_committed": node.is_committed,
        "is_standing": node.is_standing,
        "spans": [
            {"start": one.start, "end": one.end, "version": one.version, "engine": one.engine}
            for one in node.spans
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
