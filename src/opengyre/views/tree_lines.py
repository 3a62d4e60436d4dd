"""An execution's tree as lines of text.

Owns: words and columns. Must not know: files, colours. Invariant: without `is_all` the number of
lines follows the number of forks, not of turns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from opengyre.trajectory.account import TokenAccount
from opengyre.trajectory.tree import Fork, Node
from opengyre.views.spines import Spine, joined, spines_of
from opengyre.views.tables import table, turn_cells
from opengyre.views.trees import ExecutionTree, NodeEnd
from opengyre.views.words import tokens_by_reason


def tree_lines(tree: ExecutionTree, *, is_all: bool = False) -> list[str]:
    """The header, then a line for each spine, or with `is_all` for each attempt."""
    spines = spines_of(tree.ends)
    rows = list(_all_rows(spines, depth=0) if is_all else _spine_rows(spines, depth=0))
    empty = f"no tree: {tree.problem}" if tree.problem else "no turns"
    return [*header_lines(tree), "", *(table(rows) if rows else [empty])]


def header_lines(tree: ExecutionTree) -> list[str]:
    one, account = tree.one, tree.account
    outcome = "still open" if one.outcome is None else one.outcome.value
    where = "no step consumed it" if tree.step is None else f"step {tree.step}"
    kind = "evaluation" if one.group is None else f"group {one.group}"
    launches = f", {one.num_launches} launches" if one.num_launches > 1 else ""
    return [
        f"{one.execution}  {kind}, task {one.task or 'unknown'}, {outcome}{launches}, {where}",
        f"  {_reward_words(tree)}",
        f"  {account_words(account)}",
        f"  {tree.num_turns} turns{''.join(f', {n} {name}' for name, n in tree.forks.items())}",
    ]


def account_words(account: TokenAccount) -> str:
    parts = [f"{account.sampled} tokens sampled = {account.trained} trained"]
    for name, counts in (("masked", account.masked), ("dropped", account.dropped)):
        if counts:
            parts.append(f"{sum(counts.values())} {name} ({tokens_by_reason(counts)})")
    return " + ".join(parts)


def _reward_words(tree: ExecutionTree) -> str:
    one = tree.one
    if one.reward is None:
        return f"no verdict{f': {one.verdict_reason}' if one.verdict_reason else ''}"
    words = f"reward {one.reward:.4g}"
    if one.exclusion:
        words += f", takes no part: {one.exclusion}"
    elif one.value is not None and one.value != one.reward:
        words += f", shaped {one.value:.4g}"
    return words if tree.advantage is None else f"{words}, advantage {tree.advantage:+.4f}"


def _spine_rows(spines: Sequence[Spine], *, depth: int) -> Iterator[dict[str, Any]]:
    for spine in joined(spines):
        yield _spine_cells(spine.ends, depth)
        yield from _spine_rows([branch for _, branch in spine.branches], depth=depth + 1)


def _spine_cells(ends: Sequence[NodeEnd], depth: int) -> dict[str, Any]:
    spans = [span for end in ends for span in end.node.spans]
    first, last, num = ends[0].node, ends[-1].node, len(ends)
    turns = short(first) if num == 1 else f"{short(first)}..{short(last)} ({num})"
    return {
        "fork": _indent(depth) + _fork_words(ends),
        "role": first.role.value,
        "turns": turns,
        "keeps": _kept_words(first),
        "injected": sum(end.node.num_injected for end in ends),
        "sampled": sum(end.node.num_sampled for end in ends),
        "trained": sum(end.num_trained for end in ends),
        "not trained": _rest_words(ends) or "-",
        "versions": _from_to([span.version for span in spans], "v"),
        "engines": len({span.engine for span in spans}),
    }


def _all_rows(spines: Sequence[Spine], *, depth: int) -> Iterator[dict[str, Any]]:
    """Branches stand behind the attempt that they leave."""
    for spine in spines:
        for place, end in enumerate(spine.ends):
            yield _turn_cells(end, depth)
            here = [branch for at, branch in spine.branches if at == place]
            yield from _all_rows(here, depth=depth + 1)


def _turn_cells(end: NodeEnd, depth: int) -> dict[str, Any]:
    cells = turn_cells(end.record)
    names = ("sampled", "calls", "malformed", "watched", "finish", "took s", "held s")
    return {
        "fork": _indent(depth) + end.node.fork.value,
        "role": end.node.role.value,
        "turn": short(end.node),
        "keeps": _kept_words(end.node),
        "injected": end.node.num_injected,
        "trained": end.num_trained,
        "not trained": _rest_words([end]) or "-",
        **{name: cells[name] for name in names},
    }


def _indent(depth: int) -> str:
    return "|  " * (depth - 1) + "+- " if depth else ""


def _kept_words(node: Node) -> str:
    if node.parent is None or node.fork is Fork.CONTINUED:
        return "-"
    return f"{node.begin} of {short(node.parent)}"


def _fork_words(ends: Sequence[NodeEnd]) -> str:
    """What began it, then what happened on the way."""
    first = ends[0].node.fork
    counts = Counter(end.node.fork for end in ends[1:])
    num = counts.pop(first, 0) if first not in (Fork.CONTINUED, Fork.ROOT) else 0
    counts.pop(Fork.CONTINUED, None)
    words = [f"{num + 1} {first.value}" if num else first.value]
    return ", ".join([*words, *(f"{num} {fork.value}" for fork, num in counts.items())])


def short(node: Node) -> str:
    """`t7`, or `t7#1` for a call that was made again."""
    turn = node.turn.partition(".")[2]
    return turn if node.fork is not Fork.RETRY else f"{turn}#{node.attempt}"


def _rest_words(ends: Sequence[NodeEnd]) -> str:
    counts: Counter[str] = Counter()
    for end in ends:
        if end.num_rest:
            counts[f"{end.reason} ({'dropped' if end.is_dropped else 'masked'})"] += end.num_rest
    return ", ".join(f"{num} {reason}" for reason, num in counts.most_common())


def _from_to(numbers: Sequence[int], prefix: str) -> str:
    if not numbers:
        return "-"
    first, last = min(numbers), max(numbers)
    return f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
