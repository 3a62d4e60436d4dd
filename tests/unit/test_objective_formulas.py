"""The vectorised objective against a loop over tokens and against finite differences."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from opengyre.trainer.objective import GspoSettings, OldPolicy, Trained, loss_sum, token_losses

WIDE = 0.8, 1.25


@dataclass(frozen=True)
class _Path:
    advantage: float
    num_execution_tokens: int
    new: list[float]
    rollout: list[float]


PATHS = [
    _Path(1.3, 5, [-0.1, -0.7, -1.2], [-0.12, -0.69, -1.25]),
    _Path(1.3, 5, [-0.3, -0.4], [-0.9, -0.9]),
    _Path(-0.8, 2, [-2.0, -0.05], [-1.5, -0.5]),
    _Path(-0.8, 4, [-0.2, -3.0, -0.6, -0.1], [-0.9, -5.0, -0.8, -0.3]),
    _Path(0.5, 1, [-0.02], [-4.0]),
]


def _trained(paths: list[_Path]) -> tuple[Tensor, Trained]:
    nums = [len(path.new) for path in paths]
    new = [value for path in paths for value in path.new]
    rollout = [value for path in paths for value in path.rollout]
    double = torch.float64
    trained = Trained(
        logp_rollout=torch.tensor(rollout, dtype=double),
        path_of_token=torch.repeat_interleave(torch.arange(len(paths)), torch.tensor(nums)),
        advantages=torch.tensor([path.advantage for path in paths], dtype=double),
        num_path_tokens=torch.tensor(nums, dtype=double),
        num_execution_tokens=torch.tensor(
            [path.num_execution_tokens for path in paths], dtype=double
        ),
    )
    return torch.tensor(new, dtype=double, requires_grad=True), trained


def _loop(paths: list[_Path], settings: GspoSettings) -> tuple[float, list[float], int]:
    """Loss sum, its gradient by token, and the tokens cut: one token at a time, no autograd."""
    total, gradient, num_cut = 0.0, [], 0
    for path in paths:
        is_step = settings.old is OldPolicy.STEP
        olds = path.new if is_step else path.rollout
        mean = math.fsum(n - o for n, o in zip(path.new, olds, strict=True)) / len(path.new)
        s = math.exp(mean)
        for old, rollout in zip(olds, path.rollout, strict=True):
            weight = min(math.exp(old - rollout), settings.max_token_weight)
            free = s * path.advantage
            clipped = min(max(s, settings.clip_low), settings.clip_high) * path.advantage
            total += -weight * min(free, clipped) / path.num_execution_tokens
            is_clipped = clipped < free
            slope = 0.0 if is_clipped else s * path.advantage
            gradient.append(-weight * slope / path.num_execution_tokens)
            num_cut += weight >= settings.max_token_weight if is_step else is_clipped
    return total, gradient, num_cut


@pytest.mark.parametrize("old", list(OldPolicy))
@pytest.mark.parametrize("interval", [(0.995, 1.005), WIDE])
def test_loss_gradient_and_clip_share_equal_a_loop_over_tokens(
    old: OldPolicy, interval: tuple[float, float]
) -> None:
    settings = GspoSettings(old=old, clip_low=interval[0], clip_high=interval[1])
    logp_new, trained = _trained(PATHS)
    loss, num_cut = loss_sum(logp_new, trained, settings)
    loss.backward()
    want_loss, want_gradient, want_cut = _loop(PATHS, settings)
    assert float(loss.detach()) == pytest.approx(want_loss, rel=1e-13)
    assert logp_new.grad is not None
    assert logp_new.grad.tolist() == pytest.approx(want_gradient, rel=1e-13, abs=1e-15)
    assert num_cut == want_cut > 0


def _surrogate(values: Tensor, at: Tensor, trained: Trained, settings: GspoSettings) -> float:
    """The loss with every sg[...] frozen at `at`: what the gradient is the derivative of."""
    old = at if settings.old is OldPolicy.STEP else trained.logp_rollout
    sums = torch.zeros_like(trained.num_path_tokens)
    s_j = (sums.index_add(0, trained.path_of_token, at - old) / trained.num_path_tokens).exp()
    ratio = s_j[trained.path_of_token] * (values - at).exp()
    weight = (old - trained.logp_rollout).exp().clamp(max=settings.max_token_weight)
    advantage = trained.advantages[trained.path_of_token]
    clipped = ratio.clamp(settings.clip_low, settings.clip_high) * advantage
    losses = -weight * torch.minimum(ratio * advantage, clipped)
    return float((losses / trained.num_execution_tokens[trained.path_of_token]).sum())


@pytest.mark.parametrize("old", list(OldPolicy))
def test_the_gradient_is_the_finite_difference_of_the_surrogate(old: OldPolicy) -> None:
    settings = GspoSettings(old=old, clip_low=WIDE[0], clip_high=WIDE[1])
    logp_new, trained = _trained(PATHS)
    loss_sum(logp_new, trained, settings)[0].backward()
    at = logp_new.detach()
    assert logp_new.grad is not None
    for token in range(len(at)):
        step = torch.zeros_like(at)
        step[token] = 1e-6
        up = _surrogate(at + step, at, trained, settings)
        down = _surrogate(at - step, at, trained, settings)
        assert float(logp_new.grad[token]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_on_policy_both_modes_give_the_plain_policy_gradient_and_cut_nothing() -> None:
    """The tie of the minimum at s = 1 must not halve the gradient."""
    paths = [replace(path, rollout=path.new) for path in PATHS]
    for old in OldPolicy:
        logp_new, trained = _trained(paths)
        loss, num_cut = loss_sum(logp_new, trained, GspoSettings(old=old))
        loss.backward()
        want = [-path.advantage / path.num_execution_tokens for path in paths for _ in path.new]
        assert logp_new.grad is not None
        assert logp_new.grad.tolist() == pytest.approx(want, rel=1e-13)
        assert num_cut == 0


def test_a_drifted_sequence_loses_its_gradient_only_in_the_direction_of_its_drift() -> None:
    up = _Path(1.0, 1, [-0.1], [-0.2])
    for advantage, is_cut in ((1.0, True), (-1.0, False)):
        logp_new, trained = _trained([replace(up, advantage=advantage)])
        losses, num_cut = token_losses(logp_new, trained, GspoSettings())
        losses.sum().backward()
        assert logp_new.grad is not None
        assert (float(logp_new.grad[0]) == 0.0) is is_cut
        assert num_cut == int(is_cut)


def test_any_split_into_micro_steps_adds_up_to_the_batch() -> None:
    whole, trained = _trained(PATHS)
    total, _ = loss_sum(whole, trained, GspoSettings())
    for cut in range(1, len(PATHS)):
        parts = [_trained(PATHS[:cut]), _trained(PATHS[cut:])]
        split = sum(float(loss_sum(*part, GspoSettings())[0].detach()) for part in parts)
        assert split == pytest.approx(float(total.detach()), rel=1e-14)
