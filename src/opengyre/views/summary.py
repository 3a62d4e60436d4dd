"""`summary.json`: what a run did, in one flat object.

Owns: its keys and their divisors. Must not know: files, terminals. Invariant: everything comes
from the journal's fold; a mean over nothing is None, never 0.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from opengyre.control.facts import Outcome
from opengyre.control.groups import GroupState
from opengyre.store.observations import Continued, EvalResult
from opengyre.views.handoffs import counts_of
from opengyre.views.run_state import GroupView, RunState


def summarise(state: RunState) -> dict[str, Any]:
    """The summary of a run whose rows were folded into `state`.

    Rewards are means over executions with a verdict; `reward_by_burst` is by the burst of
    dispatch, training executions alone.
    """
    started, ended = state.started, state.ended
    num_tokens = sum(turn.num_completion_tokens for turn in state.turns.values())
    return {
        "version": None if started is None else started.version,
        "seed": None if started is None else started.seed,
        "is_failed": ended is None or ended.is_failed,
        "is_interrupted": ended is not None and ended.is_interrupted,
        "reason": "the run has not ended" if ended is None else ended.reason,
        "wall_s": round(state.now_s if ended is None else ended.wall_s, 3),
        "policy_version": state.steps[-1].version_after if state.steps else 0,
        "num_steps": len(state.steps),
        "short_steps": sum(step.is_short for step in state.steps),
        "empty_steps": sum(not step.is_applied for step in state.steps),
        "eval_before": _eval_at(state, 0),
        "eval_after": _eval_at(state, -1) if len(state.evals) > 1 else None,
        "reward_by_burst": list(rewards_by_number(state).values()),
        "role_changes": state.num_role_changes,
        "mid_batch_joins": sum(join.is_mid_batch for _, join in state.joins),
        "joins": len(state.joins),
        "requests_continued": len(state.continued),
        "requests_continued_by_reason": _counted(why_continued(one) for _, one in state.continued),
        "handoffs": _handoffs(state),
        "tokens_lost": tokens_lost(state),
        "harness_errors_from_moves": sum(one.during_move for one in state.harness_errors),
        "gateway_deaths": len(state.gateways_lost),
        "engine_deaths": _counted(one.where for one in state.happenings if one.what == "lost"),
        "publications": len({one.version for _, one in state.published}),
        "publications_across_live_requests": len(versions_across_requests(state)),
        "retention_decisions": {"retained": state.num_retained, "returned": state.num_returned},
        "executions_by_outcome": _counted(
            "open" if one.outcome is None else one.outcome.value
            for one in state.executions.values()
        ),
        "executions_without_verdict": sum(
            one.has_last_word and one.reward is None for one in state.executions.values()
        ),
        "no_verdict_reason": _common_reason(state),
        "groups": _groups(state),
        "turns": len(state.turns),
        "sampled_tokens": num_tokens,
        "trained_tokens": _trained(state),
        "device_seconds": {
            name: round(seconds, 3) for name, seconds in state.device_seconds().items()
        },
    }


def _handoffs(state: RunState) -> dict[str, int]:
    """What became of the prefixes that engines kept for each other."""
    counts = counts_of(state.handoffs.values())
    return {
        "handed_over": counts.num_handed_over,
        "recomputed": counts.num_recomputed,
        "idle": counts.num_idle,
        "not_wanted": counts.num_others,
        "leases_ended": counts.num_leases_ended,
        "cached_tokens": counts.num_tokens,
        "read_bytes": counts.num_bytes,
    }


def _trained(state: RunState) -> int | None:
    """None in a run whose steps did not tell."""
    members = [one for step in state.steps for one in step.members]
    return None if state.steps and not members else sum(one.trained for one in members)


def _common_reason(state: RunState) -> str:
    """The most frequent reason for which an execution that ended has no verdict."""
    reasons = Counter(
        one.verdict_reason
        for one in state.executions.values()
        if one.has_last_word and one.reward is None and one.verdict_reason
    )
    return reasons.most_common(1)[0][0] if reasons else ""


def rewards_by_number(state: RunState) -> dict[int, float | None]:
    """Mean reward of the training executions dispatched in each burst, first burst first."""
    rewards: dict[int, list[float]] = {}
    for one in state.executions.values():
        if one.group is not None:
            burst = rewards.setdefault(one.burst, [])
            if one.reward is not None:
                burst.append(one.reward)
    return {burst: _mean(values) for burst, values in sorted(rewards.items())}


def why_continued(told: Continued) -> str:
    """move, publication or engine_lost: a frozen request goes on elsewhere, or under a later
    version where it was; any other end of its stream is the engine's."""
    if told.reason in ("move", "publication", "engine_lost"):
        return told.reason
    if told.reason != "frozen":
        return "engine_lost"
    return "publication" if told.from_engine == told.to_engine else "move"


def versions_across_requests(state: RunState) -> set[int]:
    """Versions that were published while a request was being sampled: its tokens hold both."""
    return {
        span.policy_version
        for turn in state.turns.values()
        for span in turn.spans
        if span.policy_version > turn.spans[0].policy_version
    }


def mean_eval(result: EvalResult) -> float | None:
    """Mean over the held-out tasks that have a verdict."""
    return _mean([one for one in result.rewards if one is not None])


def tokens_lost(state: RunState) -> int:
    """Tokens that a cut request had and its recorded turn does not hold; 0 by promise P5."""
    recorded: dict[str, int] = {}
    for turn in state.turns.values():
        size = max(recorded.get(turn.turn, 0), turn.num_completion_tokens)
        recorded[turn.turn] = size
    had: dict[str, int] = {}
    for _, one in state.continued:
        had[one.turn] = max(had.get(one.turn, 0), one.num_tokens_so_far)
    return sum(max(0, size - recorded.get(turn, 0)) for turn, size in had.items())


def _groups(state: RunState) -> dict[str, int]:
    """What became of them; `no_variance` of the consumed ones had equal rewards. `unused`: neither
    trained nor wrong: too old, or more than was needed; its members may have been cancelled for
    that."""
    counted = Counter(_group_words(state, one) for one in state.groups.values())
    return {
        "dispatched": len(state.groups),
        **{name: counted[name] for name in ("consumed", "void", "filtered", "unused")},
        "no_variance": sum(step.num_no_variance for step in state.steps),
    }


def _group_words(state: RunState, group: GroupView) -> str:
    place = state.group_state(group)
    if place is GroupState.CONSUMED:
        return "consumed"
    if place is GroupState.FILTERED:
        return "filtered"
    is_cut = any(state.executions[member].outcome is Outcome.CANCELLED for member in group.members)
    return "void" if place is GroupState.VOID and not is_cut else "unused"


def _eval_at(state: RunState, place: int) -> float | None:
    return mean_eval(state.evals[place][1]) if state.evals else None


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
