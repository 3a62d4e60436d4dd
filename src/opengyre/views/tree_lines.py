"""An execution's tree as lines of text.

Owns: words and columns. Must not know: files, colours. Invariant: without `is_all` the number of
lines follows the number of forks, not of turns.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opengyre.trajectory.account import TokenAccount
from opengyre.trajectory.tree import Fork
from opengyre.views.spines import Spine, Stretch, spines_of
from opengyre.views.tables import table, turn_cells
from opengyre.views.trees import ExecutionTree, NodeEnd


def tree_lines(tree: ExecutionTree, *, is_all: bool = False) -> list[str]:
    """The header, then a line for each stretch, or with `is_all` for each attempt."""
    rows = list(_rows(spines_of(tree.ends, is_collapsed=not is_all), depth=0, is_all=is_all))
    return [*header_lines(tree), "", *(table(rows) if rows else ["no turns"])]


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
            parts.append(f"{sum(counts.values())} {name} ({reason_words(counts)})")
    return " + ".join(parts)


def reason_words(counts: Mapping[str, int]) -> str:
    in_order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{num} {reason}" for reason, num in in_order)


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


def _rows(spines: Sequence[Spine], *, depth: int, is_all: bool) -> Iterator[dict[str, Any]]:
    """Depth first, with a spine's branches behind the stretch that they leave."""
    for spine in spines:
        for stretch in spine.stretches:
            yield _stretch_cells(stretch, depth) if not is_all else _turn_row(stretch, depth)
            yield from _rows(stretch.branches, depth=depth + 1, is_all=is_all)


def _stretch_cells(stretch: Stretch, depth: int) -> dict[str, Any]:
    ends = stretch.ends
    spans = [span for end in ends for span in end.node.spans]
    return {
        **_place_cells(stretch, depth),
        "injected": sum(end.node.num_injected for end in ends),
        "sampled": sum(end.node.num_sampled for end in ends),
        "trained": sum(end.num_trained for end in ends),
        "not trained": _rest_words(ends) or "-",
        "versions": _from_to([span.version for span in spans], "v"),
        "engines": len({span.engine for span in spans}),
    }


def _turn_row(stretch: Stretch, depth: int) -> dict[str, Any]:
    (end,) = stretch.ends
    cells = turn_cells(end.record)
    names = ("sampled", "calls", "malformed", "watched", "finish", "took s", "held s")
    return {
        **_place_cells(stretch, depth),
        "injected": end.node.num_injected,
        "trained": end.num_trained,
        "not trained": _rest_words([end]) or "-",
        **{name: cells[name] for name in names},
    }


def _place_cells(stretch: Stretch, depth: int) -> dict[str, Any]:
    parent = stretch.first.parent
    is_plain = stretch.first.fork is Fork.CONTINUED
    return {
        "fork": "|  " * max(0, depth - 1) + "+- " * (depth > 0) + _fork_words(stretch),
        "role": stretch.first.role.value,
        "turns": _turns(stretch),
        "keeps": "-" if parent is None or is_plain else f"{stretch.first.begin} of {short(parent)}",
    }


def _fork_words(stretch: Stretch) -> str:
    word = stretch.first.fork.value
    num = sum(end.node.fork is stretch.first.fork for end in stretch.ends)
    is_told = num > 1 and stretch.first.fork is not Fork.CONTINUED
    return f"{word} x{num}" if is_told else word


def _turns(stretch: Stretch) -> str:
    num = len(stretch.ends)
    if num == 1:
        return short(stretch.first)
    return f"{short(stretch.first)}..{short(stretch.last)} ({num})"


def short(node: Any) -> str:
    """`t7`, or `t7#1` for another attempt than the first."""
    turn = str(node.turn).partition(".")[2]
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
