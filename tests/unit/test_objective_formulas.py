"""Every shipped objective against a loop over tokens and against finite differences."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opengyre.config.objectives import OBJECTIVE_DEFAULTS, defaults_of
from opengyre.config.training import TrainingConfig
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.kl import k3
from opengyre.trainer.objectives.ratios import truncated_weight
from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy, Trained
from tests.unit.objective_batches import PATHS, TrainedPath, tensors
from tests.unit.objective_loops import LOOPS

WIDE = 0.8, 1.25
OWN = None


def _settings(
    name: str, old: OldPolicy, interval: tuple[float, float] | None = OWN
) -> ObjectiveSettings:
    low, high = interval or (defaults_of(name).clip_low, defaults_of(name).clip_high)
    return ObjectiveSettings(old=old, clip_low=low, clip_high=high)


def _gradient(name: str, paths: list[TrainedPath], settings: ObjectiveSettings) -> list[float]:
    logp_new, trained = tensors(paths)
    OBJECTIVES[name](logp_new, trained, settings).losses.sum().backward()
    assert logp_new.grad is not None
    gradient: list[float] = logp_new.grad.tolist()
    return gradient


def test_config_has_defaults_for_exactly_what_ships() -> None:
    assert OBJECTIVE_DEFAULTS.keys() == OBJECTIVES.keys() == LOOPS.keys()


def test_settings_that_are_left_out_are_those_of_a_config_that_leaves_them_out() -> None:
    own, training = ObjectiveSettings(), TrainingConfig()
    assert (own.old, own.clip_low, own.clip_high, own.max_token_weight) == (
        training.old,
        training.clip_low,
        training.clip_high,
        training.max_token_weight,
    )
    assert StreamedLoss().averaging == training.averaging
    assert OBJECTIVES[training.objective] is StreamedLoss().objective


@pytest.mark.parametrize("old", list(OldPolicy))
@pytest.mark.parametrize("interval", [OWN, WIDE])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_losses_gradient_and_cut_tokens_equal_a_loop_over_tokens(
    name: str, interval: tuple[float, float] | None, old: OldPolicy
) -> None:
    settings = _settings(name, old, interval)
    logp_new, trained = tensors(PATHS)
    made = OBJECTIVES[name](logp_new, trained, settings)
    want = [token for path in PATHS for token in LOOPS[name](path, settings)]
    assert made.losses.tolist() == pytest.approx([loss for loss, _, _ in want], rel=1e-13)
    assert _gradient(name, PATHS, settings) == pytest.approx(
        [slope for _, slope, _ in want], rel=1e-13, abs=1e-15
    )
    assert made.num_cut == sum(is_cut for _, _, is_cut in want) > 0


def _smooth(name: str, at: Tensor, trained: Trained, old: OldPolicy) -> Callable[[Tensor], Tensor]:
    """The losses as a plain function of logp_new: what an objective detaches, frozen at `at`."""
    settings = _settings(name, old)
    logp_old = at if old is OldPolicy.STEP else trained.logp_rollout
    means = _path_means(trained)
    rows = trained.path_of_token
    drift = logp_old - trained.logp_rollout
    weight = (means(drift) if name == "gspo" else drift).exp().clamp(max=settings.max_token_weight)

    def losses(logp_new: Tensor) -> Tensor:
        if name == "cispo":
            bounded = (at - logp_old).exp().clamp(settings.clip_low, settings.clip_high)
            return -weight * bounded * trained.advantages[rows] * logp_new
        ratio = {
            "gspo_paper": means(at - logp_old).exp() * (logp_new - at).exp(),
            "gspo": means(logp_new - logp_old).exp(),
        }.get(name, (logp_new - logp_old).exp())
        bounded = ratio.clamp(settings.clip_low, settings.clip_high)
        advantage = trained.advantages[rows]
        return -weight * torch.minimum(ratio * advantage, bounded * advantage)

    return losses


def _path_means(trained: Trained) -> Callable[[Tensor], Tensor]:
    """The mean over each token's path, [M]: a matrix instead of the sums of the product's code."""
    same = trained.path_of_token[:, None] == trained.path_of_token[None, :]
    share = same.to(torch.float64) / same.sum(1, keepdim=True)
    return lambda values: share @ values


@pytest.mark.parametrize("old", list(OldPolicy))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_the_gradient_is_the_finite_difference_of_the_surrogate(name: str, old: OldPolicy) -> None:
    """No token of the batch is at a kink."""
    logp_new, trained = tensors(PATHS)
    gradient = _gradient(name, PATHS, _settings(name, old))
    at = logp_new.detach()
    losses = _smooth(name, at, trained, old)
    for token in range(len(at)):
        step = torch.zeros_like(at)
        step[token] = 1e-6
        slope = float((losses(at + step) - losses(at - step)).sum()) / 2e-6
        assert gradient[token] == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dr_grpo"])
def test_an_objective_that_detaches_nothing_passes_gradcheck(name: str) -> None:
    logp_new, trained = tensors(PATHS)
    settings = _settings(name, OldPolicy.ROLLOUT, WIDE)
    assert torch.autograd.gradcheck(
        lambda values: OBJECTIVES[name](values, trained, settings).losses, (logp_new,)
    )


@pytest.mark.parametrize("old", list(OldPolicy))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_on_policy_every_objective_is_the_plain_policy_gradient(name: str, old: OldPolicy) -> None:
    """The tie of the minimum at ratio 1 must not halve the gradient."""
    paths = [replace(path, rollout=path.new) for path in PATHS]
    want = [-path.advantage for path in paths for _ in path.new]
    settings = _settings(name, old)
    assert _gradient(name, paths, settings) == pytest.approx(want, rel=1e-13)
    assert OBJECTIVES[name](*tensors(paths), settings).num_cut == 0


@pytest.mark.parametrize("name", ["gspo_paper", "gspo", "grpo", "dr_grpo"])
def test_a_drifted_path_loses_its_gradient_only_in_the_direction_of_its_drift(name: str) -> None:
    """The clamp acts on the ratio that carries the gradient, not on a detached copy."""
    up = TrainedPath(1.0, 1, [-0.1], [-0.6])
    for advantage, is_cut in ((1.0, True), (-1.0, False)):
        path = replace(up, advantage=advantage)
        (slope,) = _gradient(name, [path], _settings(name, OldPolicy.ROLLOUT))
        assert (slope == 0.0) is is_cut


def test_cispo_bounds_a_token_and_keeps_its_gradient() -> None:
    far = TrainedPath(1.0, 1, [-0.1], [-4.1])
    assert _gradient("cispo", [far], _settings("cispo", OldPolicy.ROLLOUT)) == [-5.0]


def test_a_weight_carries_no_gradient() -> None:
    drift = torch.tensor([0.5, 4.0], dtype=torch.float64, requires_grad=True)
    weight = truncated_weight(drift, ObjectiveSettings())
    assert not weight.requires_grad
    assert weight.tolist() == [pytest.approx(math.exp(0.5)), 5.0]


def test_with_one_pass_a_capped_weight_is_the_same_in_three_objectives() -> None:
    """CISPO without a lower bound, and token-wise GRPO and GSPO with old = step."""
    cispo = _gradient("cispo", PATHS, _settings("cispo", OldPolicy.ROLLOUT))
    for name in ("grpo", "gspo_paper"):
        assert _gradient(name, PATHS, _settings(name, OldPolicy.STEP)) == pytest.approx(cispo)


def test_both_gspo_forms_have_one_gradient() -> None:
    """Differentiated through the mean or token by token: the sums over a path agree."""
    settings = _settings("gspo", OldPolicy.ROLLOUT, WIDE)
    first, second = _gradient("gspo", PATHS, settings), _gradient("gspo_paper", PATHS, settings)
    assert first == pytest.approx(second, rel=1e-13)


def test_a_single_precision_batch_gives_single_precision_losses() -> None:
    logp_new, trained = tensors(PATHS)
    halves = {
        name: getattr(trained, name).float()
        for name in ("logp_rollout", "advantages", "num_path_tokens", "num_execution_tokens")
    }
    trained = replace(trained, **halves)
    for objective in OBJECTIVES.values():
        for old in OldPolicy:
            made = objective(logp_new.float(), trained, ObjectiveSettings(old=old))
            assert made.losses.dtype == torch.float32


def test_k3_is_the_formula_and_its_gradient_passes_gradcheck() -> None:
    logp_new, trained = tensors(PATHS)
    reference = trained.logp_rollout
    divergence = k3(logp_new, reference)
    assert (divergence >= 0).all()
    difference = reference - logp_new.detach()
    assert divergence.tolist() == pytest.approx((difference.exp() - difference - 1).tolist())
    assert torch.autograd.gradcheck(lambda values: k3(values, reference), (logp_new,))


def test_k3_estimates_the_divergence_without_bias() -> None:
    """The mean over all tokens of a vocabulary, weighted by the new policy, is KL itself."""
    torch.manual_seed(3)
    new = torch.randn(30, dtype=torch.float64).log_softmax(-1)
    reference = torch.randn(30, dtype=torch.float64).log_softmax(-1)
    exact = float((new.exp() * (new - reference)).sum())
    assert float((new.exp() * k3(new, reference)).sum()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("old", list(OldPolicy))
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_token_whose_ratio_no_float_holds_costs_no_step(
    name: str, advantage: float, old: OldPolicy
) -> None:
    logp_new = torch.tensor([-1.0, -0.5], requires_grad=True)
    trained = Trained(
        logp_rollout=torch.tensor([-3e38, -0.5]),
        path_of_token=torch.tensor([0, 1]),
        advantages=torch.tensor([advantage, 1.0]),
        num_path_tokens=torch.ones(2),
        num_execution_tokens=torch.ones(2),
    )
    losses = OBJECTIVES[name](logp_new, trained, _settings(name, old)).losses
    losses.sum().backward()
    assert bool(losses.isfinite().all())
    assert logp_new.grad is not None
    assert bool(logp_new.grad.isfinite().all())


def test_a_divergence_that_no_float_holds_has_no_gradient() -> None:
    logp_new = torch.tensor([-3e38, -1.0], requires_grad=True)
    found = k3(logp_new, torch.tensor([-1.0, -1.5]))
    found.sum().backward()
    assert bool(found.isfinite().all())
    assert logp_new.grad is not None
    assert logp_new.grad[0] == 0.0
