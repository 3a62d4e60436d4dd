"""The objectives once more, one token at a time in plain Python: what the tensors must equal.

Each loop gives, for every token, its loss, the derivative of its path's summed losses by its own
logp_new with every sg[...] held, and whether it was cut.
"""

import math
from collections.abc import Callable, Iterable

from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy
from tests.unit.objective_batches import TrainedPath

Token = tuple[float, float, bool]
Loop = Callable[[TrainedPath, ObjectiveSettings], Iterable[Token]]


def gspo_paper(path: TrainedPath, settings: ObjectiveSettings) -> Iterable[Token]:
    olds = _olds(path, settings)
    s_j = math.exp(_mean(n - o for n, o in zip(path.new, olds, strict=True)))
    for old, rollout in zip(olds, path.rollout, strict=True):
        weight = min(math.exp(old - rollout), settings.max_token_weight)
        loss, slope, is_clipped = _clipped(s_j, path.advantage, settings)
        yield weight * loss, weight * slope * s_j, _is_cut(weight, is_clipped, settings)


def gspo(path: TrainedPath, settings: ObjectiveSettings) -> Iterable[Token]:
    """Each of the T_j equal losses has s_j's derivative by one token, s_j / T_j."""
    olds, num_tokens = _olds(path, settings), len(path.new)
    s_j = math.exp(_mean(n - o for n, o in zip(path.new, olds, strict=True)))
    drift = _mean(o - r for o, r in zip(olds, path.rollout, strict=True))
    weight = min(math.exp(drift), settings.max_token_weight)
    loss, slope, is_clipped = _clipped(s_j, path.advantage, settings)
    by_one_token = num_tokens * weight * slope * s_j / num_tokens
    for _ in path.new:
        yield weight * loss, by_one_token, _is_cut(weight, is_clipped, settings)


def grpo(path: TrainedPath, settings: ObjectiveSettings) -> Iterable[Token]:
    for new, old, rollout in zip(path.new, _olds(path, settings), path.rollout, strict=True):
        ratio = math.exp(new - old)
        weight = min(math.exp(old - rollout), settings.max_token_weight)
        loss, slope, is_clipped = _clipped(ratio, path.advantage, settings)
        yield weight * loss, weight * slope * ratio, _is_cut(weight, is_clipped, settings)


def cispo(path: TrainedPath, settings: ObjectiveSettings) -> Iterable[Token]:
    for new, old, rollout in zip(path.new, _olds(path, settings), path.rollout, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, settings.clip_low), settings.clip_high)
        weight = min(math.exp(old - rollout), settings.max_token_weight)
        slope = -weight * bounded * path.advantage
        yield slope * new, slope, _is_cut(weight, bounded != ratio, settings)


LOOPS: dict[str, Loop] = {
    "gspo_paper": gspo_paper,
    "gspo": gspo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "cispo": cispo,
}


def _clipped(
    ratio: float, advantage: float, settings: ObjectiveSettings
) -> tuple[float, float, bool]:
    """-min(r A, clip(r) A), its derivative by r, and whether the clip was chosen."""
    bounded = min(max(ratio, settings.clip_low), settings.clip_high)
    if bounded * advantage < ratio * advantage:
        return -bounded * advantage, 0.0, True
    return -ratio * advantage, -advantage, False


def _is_cut(weight: float, is_clipped: bool, settings: ObjectiveSettings) -> bool:
    is_step = settings.old is OldPolicy.STEP
    return weight >= settings.max_token_weight if is_step else is_clipped


def _olds(path: TrainedPath, settings: ObjectiveSettings) -> list[float]:
    return path.new if settings.old is OldPolicy.STEP else path.rollout


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
