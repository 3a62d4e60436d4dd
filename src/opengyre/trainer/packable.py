"""Whether a model can be trained at all, and whether its lines may share a row.

Owns: the test, on the model itself. Must not know training. Invariant: a model is packed only if
lines in one row are computed as if each were alone.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from opengyre.seams.cells import Segment, TrainedPath
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.trainer.layers import has_window, odd_ropes
from opengyre.trainer.lines_alone import can_keep_logits, logprobs_alone
from opengyre.trainer.packed_model import ATTENTION, trained_logprobs
from opengyre.trainer.stage_model import TrainingRole

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BoundaryError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What foreign modelling code raises when it is given what it does not know."""
TOLERANCE = 1e-5
"""Of logprobs from calls of the same shapes, relative and absolute."""
PACKED_TOLERANCE = 1e-3
"""Of logprobs from other shapes and other kernels, in float32 at any size of model."""

NUM_PROBED = 10
SEGMENTS = [
    Segment(start=0, end=3),
    Segment(start=3, end=7),
    Segment(start=7, end=NUM_PROBED, ancestors=[(3, 5)]),
]
"""A line, another one, and a branch that leaves the second after two tokens."""
DEPTHS = [0, 1, 2, 0, 1, 2, 3, 2, 3, 4]
LAST = [2, 6, 9]
"""The last token of each; NOT_LAST are the places of the other logprobs."""
NOT_LAST = [0, 2, 3, 5, 6]
UNSEEN = [0, 1, 2, 5, 6]
"""Tokens that the branch must not see."""


def refuse_untrainable(module: Any) -> None:
    """Raises ConfigError, one line, if a token's logprob depends on tokens behind it, or no
    gradient of logprobs reaches the first weights."""
    role = TrainingRole(module, module.config, attention=None)
    try:
        role.enter()
        reason = _untrainable(module)
    except FAILURES as error:
        reason = _words(error)
    finally:
        role.leave()
    if reason:
        raise ConfigError(
            f"a model of type {module.config.model_type!r} cannot be trained ({reason}); choose a "
            "causal language model whose forward takes input_ids and returns logits"
        )


def why_not_packed(module: Any) -> str:
    """Why each line has to be computed by itself, "" if lines may share a row."""
    reason = _told_reason(module)
    if reason:
        return reason
    token_ids = _token_ids(module)
    with torch.no_grad():
        alone = _in_role(module, None, token_ids)
        try:
            packed = _in_role(module, ATTENTION, token_ids)
            others = token_ids.clone()
            others[UNSEEN] = others[UNSEEN].flip(0)
            changed = _in_role(module, ATTENTION, others)
        except FAILURES as error:
            return _words(error)
    if not torch.allclose(packed, alone, rtol=PACKED_TOLERANCE, atol=PACKED_TOLERANCE):
        return "lines in one row differ from lines alone"
    num_branch = SEGMENTS[-1].end - SEGMENTS[-1].start
    if not torch.equal(packed[-num_branch:], changed[-num_branch:]):
        return "a token sees other lines than its own"
    return ""


def _untrainable(module: Any) -> str:
    if getattr(module.config, "is_encoder_decoder", False):
        return "it has an encoder"
    token_ids = _token_ids(module)
    logprobs = _alone(module, token_ids)
    torch.autograd.grad(logprobs.sum(), [module.get_input_embeddings().weight])
    others = token_ids.clone()
    others[LAST] = others[LAST].flip(0)
    with torch.no_grad():
        changed = _alone(module, others)
    before, after = logprobs[NOT_LAST], changed[NOT_LAST]
    is_causal = torch.allclose(before, after, rtol=TOLERANCE, atol=TOLERANCE)
    return "" if is_causal else "a token's logprob depends on what comes after it"


def _told_reason(module: Any) -> str:
    """What the model's class and its config say."""
    if not getattr(module, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if not {"position_ids", "logits_to_keep"} <= set(inspect.signature(module.forward).parameters):
        return "its forward takes no position_ids or no logits_to_keep"
    if has_window(module.config):
        return "its attention has a window"
    if ropes := odd_ropes(module.config):
        return f"its rotary embedding is of type {ropes[0]!r}"
    return ""


def _in_role(module: nn.Module, attention: str | None, token_ids: Tensor) -> Tensor:
    """Logprobs of the lines' tokens, all but the first of each."""
    role = TrainingRole(module, module.config, attention=attention)
    role.enter()
    try:
        return _alone(module, token_ids) if attention is None else _packed(module, token_ids)
    finally:
        role.leave()


def _alone(module: nn.Module, token_ids: Tensor) -> Tensor:
    paths = [
        TrainedPath(
            execution="",
            group="",
            turn="",
            pieces=[*one.ancestors, (one.start, one.end)],
            trained=[(one.start + (not one.ancestors), one.end)],
            advantage=0.0,
            num_path_tokens=one.end - one.start,
            num_execution_tokens=NUM_PROBED,
        )
        for one in SEGMENTS
    ]
    return logprobs_alone(
        module,
        token_ids=token_ids,
        paths=paths,
        targets=_targets(token_ids.device),
        temperature=1.0,
        keeps_logits=can_keep_logits(module),
    )


def _packed(module: nn.Module, token_ids: Tensor) -> Tensor:
    return trained_logprobs(
        module,
        token_ids=token_ids,
        position_ids=torch.tensor(DEPTHS, device=token_ids.device),
        segments=SEGMENTS,
        targets=_targets(token_ids.device),
        temperature=1.0,
    )


def _token_ids(module: Any) -> Tensor:
    """Different ones, if the vocabulary allows."""
    weight: Tensor = module.get_input_embeddings().weight
    return torch.arange(1, NUM_PROBED + 1, device=weight.device) % weight.shape[0]


def _targets(device: torch.device) -> Tensor:
    return torch.tensor(DEPTHS, device=device).nonzero()[:, 0]


def _words(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
