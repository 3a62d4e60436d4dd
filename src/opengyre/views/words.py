"""The text a user reads when a run is over, and the numbers' spelling in it.

Owns: words. Must not know: colours, files, how the numbers came about.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from opengyre.store.observations import StepReport


def final_lines(summary: Mapping[str, Any], *, folder: str = "", report: str = "") -> list[str]:
    """The end of `gyre train`, line by line, from a summary (see `summary.summarise`)."""
    lines = [_headline(summary), ""]
    rows = [
        ("eval reward", _eval_words(summary)),
        ("reward by burst", _bursts(summary["reward_by_burst"])),
        ("updates", _updates(summary)),
        ("groups", _groups(summary["groups"])),
        ("role changes", _roles(summary)),
        ("live requests", _requests(summary)),
        ("their prefixes", _handoffs(summary["handoffs"])),
        ("deaths", _deaths(summary["engine_deaths"])),
        ("tokens", _tokens(summary)),
        ("tokens lost", str(summary["tokens_lost"])),
        ("harness errors", f"{summary['harness_errors_from_moves']} caused by moves"),
        ("executions", _counts(summary["executions_by_outcome"])),
        ("no verdict", _no_verdict(summary)),
        ("device time", _device(summary["device_seconds"])),
        ("run folder", folder),
        ("picture", report),
    ]
    lines += [f"  {name:<16} {text}" for name, text in rows if text]
    return lines


def seconds(value: float) -> str:
    """`41 s`, `3 min 05 s`."""
    if value < 100:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def reward(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def number(value: int, noun: str) -> str:
    """`1 join`, `3 joins`."""
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"


def step_words(step: StepReport) -> str:
    """One line, the most important first: what a step did, with which rewards, and where the tokens
    of its executions ended. `tree` is how many times as many tokens path by path would take."""
    size = "short " if step.is_short else ""
    groups = number(len(step.groups), "group") + _equal(step.num_no_variance)
    parts = [
        f"{size}step {step.step}: {groups}",
        f"version {step.version_after}" if step.is_applied else _no_update(step),
        f"mean reward {reward(step.mean_reward)}{_shaped(step)}",
        f"{step.num_tokens if step.is_applied else 0} tokens trained",
        _ended("masked", (one.masked for one in step.members)),
        _ended("dropped", (one.dropped for one in step.members)),
        "" if step.watched_share is None else f"{step.watched_share:.0%} of the best touched tests",
        "" if tree_gain(step) is None else f"tree {tree_gain(step):.2f}x",
        "" if step.fill is None else f"fill {step.fill:.0%}",
        _reduced_late(step),
    ]
    return ", ".join(part for part in parts if part)


def tree_gain(step: StepReport) -> float | None:
    """Tokens path by path over tokens computed; None where nothing was."""
    return step.num_repeated_tokens / step.num_flat_tokens if step.num_flat_tokens else None


def tokens_by_reason(counts: Mapping[str, int]) -> str:
    """`12 not_selected, 3 no_variance`, the most first."""
    in_order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{num} {reason}" for reason, num in in_order)


def _no_update(step: StepReport) -> str:
    return f"no update ({step.reason})" if step.reason else "no update"


def _equal(num_groups: int) -> str:
    return f" ({num_groups} with equal rewards)" if num_groups else ""


def _reduced_late(step: StepReport) -> str:
    if step.num_reduce_tries == 1:
        return ""
    return f"reduced ({step.reduced_by}) at try {step.num_reduce_tries}"


def _shaped(step: StepReport) -> str:
    is_told = step.mean_shaped not in (None, step.mean_reward)
    return f" (shaped {reward(step.mean_shaped)})" if is_told else ""


def _ended(name: str, counts: Iterable[Mapping[str, int]]) -> str:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return f"{total.total()} {name} ({tokens_by_reason(total)})" if total.total() else ""


def _headline(summary: Mapping[str, Any]) -> str:
    wall, seed = seconds(summary["wall_s"]), summary["seed"]
    if summary["is_failed"]:
        return f"Failed after {wall} (seed {seed}): {summary['reason']}"
    if summary["is_interrupted"]:
        return f"Interrupted after {wall} (seed {seed}): {summary['reason']}"
    return f"Done in {wall} (seed {seed}): {summary['reason'] or 'all steps are done'}"


def _eval_words(summary: Mapping[str, Any]) -> str:
    before, after = summary["eval_before"], summary["eval_after"]
    if before is None:
        return ""
    if after is None:
        return f"{reward(before)} before; none after"
    return f"{reward(before)} before, {reward(after)} after ({after - before:+.3f}), held-out tasks"


def _bursts(rewards: list[float | None]) -> str:
    return "  ".join("-" if one is None else f"{one:.2f}" for one in rewards)


def _updates(summary: Mapping[str, Any]) -> str:
    text = f"{number(summary['num_steps'], 'step')}, policy version {summary['policy_version']}"
    short, empty = summary["short_steps"], summary["empty_steps"]
    return text + (f", {short} short" if short else "") + (f", {empty} empty" if empty else "")


def _groups(groups: Mapping[str, int]) -> str:
    """Older summaries lack some."""
    text = f"{groups['dispatched']} dispatched, {groups['consumed']} trained"
    text += _equal(groups.get("no_variance", 0))
    reasons = {
        "filtered": "equal rewards",
        "void": "too few valid members",
        "unused": "too old or not needed",
    }
    more = [f"{groups[name]} {name} ({why})" for name, why in reasons.items() if groups.get(name)]
    return ", ".join([text, *more])


def _no_verdict(summary: Mapping[str, Any]) -> str:
    num, reason = summary["executions_without_verdict"], summary.get("no_verdict_reason", "")
    return f"{number(num, 'execution')}, most of them: {reason[:120]}" if num and reason else ""


def _tokens(summary: Mapping[str, Any]) -> str:
    """Older summaries do not tell it, older runs told no accounts."""
    sampled, trained = summary["sampled_tokens"], summary.get("trained_tokens")
    if trained is None or not sampled:
        return ""
    return f"{sampled} sampled, {trained} trained ({trained / sampled:.0%})"


def _roles(summary: Mapping[str, Any]) -> str:
    decided = summary["retention_decisions"]
    joins = number(summary["mid_batch_joins"], "mid-batch join")
    kept = f"core retained {decided['retained']}, returned {decided['returned']}"
    return f"{summary['role_changes']}, {joins}, {kept}"


def _deaths(times_by_engine: Mapping[str, int]) -> str:
    told = ", ".join(f"{engine} {times}" for engine, times in times_by_engine.items())
    return f"{told}; what they held in an open step was redone" if told else ""


def _requests(summary: Mapping[str, Any]) -> str:
    reasons = summary["requests_continued_by_reason"]
    detail = ", ".join(
        f"{count} by {reason.replace('_', ' ')}" for reason, count in reasons.items()
    )
    across = number(summary["publications_across_live_requests"], "publication")
    total = summary["requests_continued"]
    return f"{total} continued{f' ({detail})' if detail else ''}, {across} across live requests"


def _handoffs(counts: Mapping[str, int]) -> str:
    """Of requests that moved and of executions inside a tool call; nothing if none was kept."""
    moved = f"{counts['handed_over']} handed over, {counts['recomputed']} recomputed"
    idle = f", {counts['idle']} idle" if counts["idle"] else ""
    return f"{moved}{idle}" if any(counts.values()) else ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def _device(device_seconds: Mapping[str, float]) -> str:
    total = sum(device_seconds.values())
    if total <= 0:
        return ""
    shares = sorted(device_seconds.items(), key=lambda item: -item[1])
    parts = [f"{name.replace('_', ' ')} {value / total:.0%}" for name, value in shares if value > 0]
    return f"{total:.0f} device-seconds: " + ", ".join(parts)
