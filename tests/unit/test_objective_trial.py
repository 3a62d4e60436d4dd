"""An objective is tried on five tokens; what is wrong with it is one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opengyre.config.objectives import defaults_of
from opengyre.seams.errors import ConfigError
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.signature import (
    Objective,
    ObjectiveSettings,
    OldPolicy,
    TokenLosses,
    Trained,
)
from opengyre.trainer.objectives.trial import try_objective

Formula = Callable[[Tensor, Trained], Tensor]


def _objective(formula: Formula) -> Objective:
    def objective(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
        return TokenLosses(losses=formula(logp_new, trained))

    return objective


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_shipped_objective_passes_with_its_own_interval(name: str) -> None:
    own = defaults_of(name)
    settings = ObjectiveSettings(clip_low=own.clip_low, clip_high=own.clip_high)
    try_objective(OBJECTIVES[name], settings, name=name)


@pytest.mark.parametrize(
    ("formula", "fault"),
    [
        (lambda new, trained: -new.mean(), "losses have shape [] for 5 tokens"),
        (
            lambda new, trained: -new.float(),
            "losses are torch.float32 for logprobs in torch.float64",
        ),
        (lambda new, trained: new / 0, "a loss is not finite"),
        (lambda new, trained: -new.detach(), "losses do not depend on logp_new"),
        (lambda new, trained: -0 * new, "losses do not depend on logp_new"),
        (lambda new, trained: (new - new.detach()).abs().sqrt(), "a gradient is not finite"),
        (lambda new, trained: new * trained.rewards, "it raised AttributeError: "),
    ],
)
def test_a_fault_is_told_in_one_line_with_the_key(formula: Formula, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        try_objective(_objective(formula), ObjectiveSettings(), name="own.py:loss")
    line = str(refused.value)
    assert line.startswith("training.objective = own.py:loss: expected a function of")
    assert fault in line
    assert line.endswith("(old = rollout, float64)")
    assert "\n" not in line


def test_another_return_value_is_a_fault() -> None:
    def bare(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> Tensor:
        return -logp_new

    with pytest.raises(ConfigError, match="it returned Tensor"):
        try_objective(bare, ObjectiveSettings(), name="own.py:bare")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_cut", ["x", -5, 6, 1.0])
def test_a_number_of_cut_tokens_that_cannot_be_is_a_fault(num_cut: Any) -> None:
    def odd(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
        return TokenLosses(losses=-logp_new, num_cut=num_cut)

    with pytest.raises(ConfigError, match=r"num_cut is .* not a number of the 5 tokens"):
        try_objective(odd, ObjectiveSettings(), name="own.py:odd")


def test_both_modes_are_tried() -> None:
    def half(logp_new: Tensor, trained: Trained, settings: ObjectiveSettings) -> TokenLosses:
        is_step = settings.old is OldPolicy.STEP
        return TokenLosses(losses=torch.log(logp_new) if is_step else -logp_new)

    with pytest.raises(ConfigError, match=r"not finite \(old = step, float64\)"):
        try_objective(half, ObjectiveSettings(), name="own.py:half")
