"""What a model's config says of its layers: windows, rotary angles, and where it can be cut.

Must not know torch: a run is refused by these rules before anything of it starts.
"""

from typing import Any

from opengyre.seams.errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ONE_STAGE = "use topology.stages_per_cell = 1"
FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary angles that depend on the position alone, not on how long the row is."""


def layers_of_stage(num_layers: int, *, stage: int, num_stages: int) -> range:
    """Equal shares, where the head on the last stage counts as a layer; no stage is without one.

    Raises ConfigError if there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"the model has {num_layers} layers; topology.stages_per_cell = {num_stages} needs at "
            f"least {num_stages}; use topology.stages_per_cell = {num_layers} or less"
        )

    def bound(index: int) -> int:
        share = (2 * index * (num_layers + 1) + num_stages) // (2 * num_stages)
        return max(index, min(share, num_layers - (num_stages - index)))

    return range(bound(stage), bound(stage + 1))


def refuse_uncuttable(config: Any, num_stages: int) -> None:
    """Raises ConfigError, one line, for a model that `num_stages` > 1 stages cannot share."""
    if num_stages == 1:
        return
    reason = ""
    if config.model_type not in MODEL_TYPES:
        reason = f"a model of type {config.model_type!r}"
    elif has_window(config):
        reason = f"{config.model_type} with sliding-window attention"
    elif ropes := odd_ropes(config):
        reason = f"{config.model_type} with a rotary embedding of type {ropes[0]!r}"
    if reason:
        raise ConfigError(
            f"{reason} cannot be cut into {num_stages} pipeline stages; {', '.join(MODEL_TYPES)} "
            f"with full attention can; {ONE_STAGE}"
        )
    layers_of_stage(config.num_hidden_layers, stage=0, num_stages=num_stages)


def has_window(config: Any) -> bool:
    """Whether a layer sees less than its whole line, or is no attention."""
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) != {"full_attention"}
    is_used = getattr(config, "use_sliding_window", True) is not False
    return is_used and getattr(config, "sliding_window", None) is not None


def odd_ropes(config: Any) -> list[str]:
    """Types of its rotary embeddings that do not depend on the position alone."""
    told = getattr(config, "rope_parameters", None) or {}
    each = [one for one in told.values() if isinstance(one, dict)] or [told]
    return sorted({str(one.get("rope_type", "default")) for one in each} - FIXED_ROPES)
