"""The decoder of a supported HF module, run on one flat row with the module's own weights.

Owns: the arithmetic between the weights. Must not know: requests, slots, sampling. Invariants: a
weight is read from its module at each pass, so an update or a training step in place shows in the
next one; nothing of the module is changed, so it can train between two passes.
The module's own layers cost more in Python than a tiny model in arithmetic; `model.MODEL_TYPES`
have this one structure, with or without biases and query-key norms.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from opengyre.engines.torch_engine.attention import AttentionPlan


class RowDecoder:
    """Of `model` (see `load_model`), for positions below `context_tokens`: its rotary angles depend
    on the position alone, so they are computed once."""

    def __init__(self, model: Any, context_tokens: int) -> None:
        self._decoder = model.model
        weight = model.get_input_embeddings().weight
        places = torch.arange(context_tokens, device=weight.device)[None]
        with torch.inference_mode():
            cos, sin = self._decoder.rotary_emb(weight, places)
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]

    def __call__(self, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Final hidden states [T, hidden] of a row; ids and positions are [T]."""
        decoder = self._decoder
        hidden = embedding(ids, decoder.embed_tokens.weight)
        rotary = self._cos[positions], self._sin[positions]
        for layer in decoder.layers:
            normed = _normed(layer.input_layernorm, hidden)
            hidden = hidden + _attended(layer.self_attn, normed, rotary, plan)
            hidden = hidden + _fed(layer.mlp, _normed(layer.post_attention_layernorm, hidden))
        return _normed(decoder.norm, hidden)


def _attended(attention: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: Any) -> Tensor:
    by_head = (hidden.shape[0], -1, attention.head_dim)
    query = _projected(attention.q_proj, hidden).view(by_head)
    key = _projected(attention.k_proj, hidden).view(by_head)
    value = _projected(attention.v_proj, hidden).view(by_head)
    if hasattr(attention, "q_norm"):
        query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
    query, key = _turned(query, rotary).mul_(attention.scaling), _turned(key, rotary)
    return _projected(attention.o_proj, plan.attend(attention.layer_idx, query, key, value))


def _fed(mlp: Any, hidden: Tensor) -> Tensor:
    gate = mlp.act_fn(_projected(mlp.gate_proj, hidden))
    return _projected(mlp.down_proj, gate.mul_(_projected(mlp.up_proj, hidden)))


def _projected(module: Any, hidden: Tensor) -> Tensor:
    return linear(hidden, module.weight, module.bias)


def _normed(module: Any, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def _turned(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """The second half times -sin beside the first times sin: half a turn of the last axis."""
    cos, sin = rotary
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
