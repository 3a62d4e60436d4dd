"""The decoder of a supported HF module, run on one flat row with the module's own weights.

Owns: the arithmetic between the weights. Must not know: requests, slots, sampling. Invariants: a
weight is read from its module's table at each pass, so an update or a training step shows in the
next one; nothing of the module is changed, so it can train between two passes.
The module's own layers cost more in Python than a tiny model in arithmetic; `model.MODEL_TYPES`
have this one structure, with or without biases and query-key norms, and scores of queries and keys
divided by the root of their length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from opengyre.engines.torch_engine.attention import AttentionPlan

Rotary = tuple[Tensor, Tensor]
Weights = Mapping[str, Any]
"""`weight` and `bias` of one module: its own table of parameters, which follows it. To look them up
at the module takes as long as a small product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weights: Weights
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self.weights["weight"]
        return torch.rms_norm(hidden, weight.shape, weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Query and key norms are there or not, both."""

    index: int
    head_dim: int
    query: Weights
    key: Weights
    value: Weights
    out: Weights
    query_norm: _Norm | None
    key_norm: _Norm | None

    def __call__(self, hidden: Tensor, rotary: Rotary, plan: AttentionPlan) -> Tensor:
        by_head = (hidden.shape[0], -1, self.head_dim)
        query = _projected(self.query, hidden).view(by_head)
        key = _projected(self.key, hidden).view(by_head)
        value = _projected(self.value, hidden).view(by_head)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        attended = plan.attend(self.index, _turned(query, rotary), _turned(key, rotary), value)
        return _projected(self.out, attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    before: _Norm
    attention: _Attention
    between: _Norm
    activation: Any
    gate: Weights
    up: Weights
    down: Weights

    def __call__(self, hidden: Tensor, rotary: Rotary, plan: AttentionPlan) -> Tensor:
        hidden = hidden + self.attention(self.before(hidden), rotary, plan)
        normed = self.between(hidden)
        gate = self.activation(_projected(self.gate, normed))
        return hidden + _projected(self.down, gate.mul_(_projected(self.up, normed)))


class RowDecoder:
    """Of `model` (see `load_model`), for positions below `context_tokens`: its rotary angles depend
    on the position alone, so they are computed once."""

    def __init__(self, model: Any, context_tokens: int) -> None:
        self._decoder = model.model
        self._layers = [_layer_of(one) for one in model.model.layers]
        weight = model.get_input_embeddings().weight
        places = torch.arange(context_tokens, device=weight.device)[None]
        with torch.inference_mode():
            cos, sin = self._decoder.rotary_emb(weight, places)
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]

    def __call__(self, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Final hidden states [T, hidden] of a row; ids and positions are [T]."""
        hidden = embedding(ids, self._decoder.embed_tokens.weight)
        rotary = self._cos[positions], self._sin[positions]
        for layer in self._layers:
            hidden = layer(hidden, rotary, plan)
        return _norm_of(self._decoder.norm)(hidden)


def _layer_of(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        before=_norm_of(layer.input_layernorm),
        attention=_Attention(
            index=attention.layer_idx,
            head_dim=attention.head_dim,
            query=attention.q_proj._parameters,
            key=attention.k_proj._parameters,
            value=attention.v_proj._parameters,
            out=attention.o_proj._parameters,
            query_norm=_norm_of(attention.q_norm) if has_norms else None,
            key_norm=_norm_of(attention.k_norm) if has_norms else None,
        ),
        between=_norm_of(layer.post_attention_layernorm),
        activation=mlp.act_fn,
        gate=mlp.gate_proj._parameters,
        up=mlp.up_proj._parameters,
        down=mlp.down_proj._parameters,
    )


def _norm_of(norm: Any) -> _Norm:
    return _Norm(weights=norm._parameters, eps=norm.variance_epsilon)


def _projected(weights: Weights, hidden: Tensor) -> Tensor:
    return linear(hidden, weights["weight"], weights["bias"])


def _turned(states: Tensor, rotary: Rotary) -> Tensor:
    """The second half times -sin beside the first times sin: half a turn of the last axis."""
    cos, sin = rotary
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
