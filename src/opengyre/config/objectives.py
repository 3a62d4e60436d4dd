"""What each shipped objective brings along: its interval, its averaging, its advantage.

Owns: the names of `training.objective` and the defaults that follow from it. Must not know
formulas. Invariant: every default of a name can be overridden by a key of its own.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationInfo

from opengyre.config.base import _resolve_callable

Averaging = Literal["execution", "token", "constant"]
Advantage = Literal["mean_std", "mean", "leave_one_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveDefaults:
    clip_low: float
    clip_high: float
    averaging: Averaging = "execution"
    advantage: Advantage = "mean_std"


OBJECTIVE_DEFAULTS = {
    "gspo_paper": ObjectiveDefaults(clip_low=0.995, clip_high=1.005),
    "gspo": ObjectiveDefaults(clip_low=0.9997, clip_high=1.0004),
    "grpo": ObjectiveDefaults(clip_low=0.8, clip_high=1.2),
    "dr_grpo": ObjectiveDefaults(
        clip_low=0.8, clip_high=1.2, averaging="constant", advantage="mean"
    ),
    "cispo": ObjectiveDefaults(clip_low=0.0, clip_high=5.0, averaging="token"),
}


def defaults_of(objective: str) -> ObjectiveDefaults:
    """Of a shipped name, or for a function of the user's: GRPO's interval and averaging."""
    return OBJECTIVE_DEFAULTS.get(objective, OBJECTIVE_DEFAULTS["grpo"])


def _resolve_objective(name: str, info: ValidationInfo) -> str:
    """A shipped objective's name stays as it is; a function's file becomes absolute."""
    if name in OBJECTIVE_DEFAULTS:
        return name
    if ":" not in name:
        known = ", ".join(OBJECTIVE_DEFAULTS)
        raise ValueError(f"expected one of {known}, file.py:function or module:function")
    return _resolve_callable(name, info)


ObjectiveName = Annotated[str, AfterValidator(_resolve_objective)]
