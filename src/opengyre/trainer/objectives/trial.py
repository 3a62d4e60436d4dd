"""Tries an objective on a tiny batch, so that a broken one is refused before a run begins.

Must not know where the function comes from. Invariant: a fault is told in one line.
"""

from dataclasses import replace

import torch
from torch import Tensor

from opengyre.seams.errors import ConfigError
from opengyre.trainer.objectives.signature import (
    Objective,
    ObjectiveSettings,
    OldPolicy,
    TokenLosses,
    Trained,
)

_NEW = (-0.9, -0.4, -1.3, -0.2, -2.1)
_PATH_OF_TOKEN = (0, 0, 1, 1, 1)
_ADVANTAGES = (1.0, -1.0)
_DRIFT = 1e-3


def try_objective(objective: Objective, settings: ObjectiveSettings, *, name: str) -> None:
    """Five tokens on two paths, in both modes and two precisions. Raises ConfigError.

    Each path drifts against its advantage, where no one-sided clip takes the gradient away.
    """
    for old in OldPolicy:
        for dtype in (torch.float64, torch.float32):
            logp_new, trained = _batch(dtype)
            try:
                made = objective(logp_new, trained, replace(settings, old=old))
                fault = _shape_fault(made, logp_new) or _gradient_fault(made, logp_new)
            except Exception as error:
                words = " ".join(str(error).split())
                fault = f"it raised {type(error).__name__}: {words}"
                raise _refusal(name, fault, old, dtype) from error
            if fault is not None:
                raise _refusal(name, fault, old, dtype)


def _refusal(name: str, fault: str, old: OldPolicy, dtype: torch.dtype) -> ConfigError:
    return ConfigError(
        f"training.objective = {name}: expected a function of (logp_new, trained, settings) that "
        f"gives TokenLosses; {fault} (old = {old}, {str(dtype).removeprefix('torch.')})"
    )


def _batch(dtype: torch.dtype) -> tuple[Tensor, Trained]:
    logp_new = torch.tensor(_NEW, dtype=dtype, requires_grad=True)
    advantages = torch.tensor(_ADVANTAGES, dtype=dtype)
    path_of_token = torch.tensor(_PATH_OF_TOKEN)
    num_tokens = torch.bincount(path_of_token).to(dtype)
    trained = Trained(
        logp_rollout=logp_new.detach() + _DRIFT * advantages[path_of_token],
        path_of_token=path_of_token,
        advantages=advantages,
        num_path_tokens=num_tokens,
        num_execution_tokens=num_tokens,
    )
    return logp_new, trained


def _shape_fault(made: object, logp_new: Tensor) -> str | None:
    if not isinstance(made, TokenLosses):
        return f"it returned {type(made).__name__}"
    losses = made.losses
    if losses.shape != logp_new.shape:
        return f"losses have shape {list(losses.shape)} for {len(logp_new)} tokens"
    if losses.dtype != logp_new.dtype:
        return f"losses are {losses.dtype} for logprobs in {logp_new.dtype}"
    if type(made.num_cut) is not int or not 0 <= made.num_cut <= len(logp_new):
        return f"num_cut is {made.num_cut!r:.40}, not a number of the {len(logp_new)} tokens"
    return None if bool(losses.isfinite().all()) else "a loss is not finite"


def _gradient_fault(made: TokenLosses, logp_new: Tensor) -> str | None:
    if not made.losses.requires_grad:
        return "losses do not depend on logp_new"
    (gradient,) = torch.autograd.grad(made.losses.sum(), logp_new, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        return "losses do not depend on logp_new"
    return None if bool(gradient.isfinite().all()) else "a gradient is not finite"
