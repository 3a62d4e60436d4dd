"""What each role of a cell holds in memory, from the config and the sizes of its model.

Owns: the arithmetic. Must not know torch, processes, how memory is measured. Invariant: it says the
most that is held between two pieces of work, so that it can be asked before anything is loaded.

Activations are counted tensor by tensor, after Korthikanti et al. 2022 ("Reducing activation
recomputation in large transformer models", section 4), for what autograd keeps of the decoder
layers here: norms before attention and MLP, rotary angles, fused attention, a gated MLP, no
dropout. A test compares the count with what autograd keeps.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from opengyre.seams.memory import MemoryHeld
from opengyre.trainer.model_sizes import ModelSizes

_ID_BYTES = 8
_NUM_MOMENTS = 2
_NUM_EXPOSED = 2
"""Copies of weights, and of gradient sums, that others may pull from one process at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`number_bytes`: of one number of weights, caches and sums. `keeps_reference`: a divergence
    from the initial weights is in the loss. `exposes_sums`: config says that gradients travel as a
    star; those of a group that fell back to it are not predicted."""

    number_bytes: int
    num_kv_tokens: int
    num_micro_step_tokens: int
    is_core: bool
    keeps_reference: bool = False
    exposes_sums: bool = False


def in_engine(sizes: ModelSizes, plan: MemoryPlan) -> MemoryHeld:
    """A standalone engine: weights and KV memory."""
    row = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
    kv_bytes = plan.num_kv_tokens * row * plan.number_bytes
    weights_bytes = sizes.num_weights * plan.number_bytes
    return _whole(
        MemoryHeld(weights_bytes=weights_bytes, kv_pool_bytes=kv_bytes, kv_used_bytes=kv_bytes)
    )


def in_rollout(sizes: ModelSizes, plan: MemoryPlan) -> MemoryHeld:
    """A cell as engine. The core keeps the weights of all its stages, and the moments."""
    engine = in_engine(sizes, plan)
    num_others = sum(sizes.num_stage_weights[1:]) if plan.is_core else 0
    return _whole(
        MemoryHeld(
            weights_bytes=(num_others + _num_frozen(sizes, plan)) * plan.number_bytes
            + engine.weights_bytes,
            kv_pool_bytes=engine.kv_pool_bytes,
            kv_used_bytes=engine.kv_used_bytes,
            optimizer_bytes=_optimizer_bytes(sizes, plan),
            exposed_bytes=_exposed_bytes(sizes, plan),
        )
    )


def in_training(sizes: ModelSizes, plan: MemoryPlan) -> MemoryHeld:
    """A cell as trainer. While sums are reduced there is a copy of them more for a moment, and
    another, of one member at a time, where they come as a star; activations have ended by then."""
    num_trained = sum(sizes.num_stage_weights)
    num_weights = sizes.num_weights + sum(sizes.num_stage_weights[1:]) + _num_frozen(sizes, plan)
    work = sum(work_bytes(sizes, plan, stage=stage) for stage in range(sizes.num_stages))
    return _whole(
        MemoryHeld(
            weights_bytes=num_weights * plan.number_bytes,
            gradients_bytes=num_trained * plan.number_bytes,
            optimizer_bytes=_optimizer_bytes(sizes, plan),
            activations_bytes=work,
            exposed_bytes=_exposed_bytes(sizes, plan),
        )
    )


def work_bytes(sizes: ModelSizes, plan: MemoryPlan, *, stage: int) -> int:
    """The most that micro-steps take on `stage`: what autograd keeps of all in flight, and of one
    the most of what comes one after the other: three tensors of logits or their gradients, a layer
    on its way back (each tensor's gradient, and as much in between), gradients of all weights."""
    num_tokens = plan.num_micro_step_tokens
    kept = saved_bytes(sizes, plan.number_bytes, num_tokens=num_tokens, stage=stage)
    num_in_flight = sizes.num_stages - stage
    is_last = stage == sizes.num_stages - 1
    num_logits = 3 * num_tokens * sizes.vocabulary if is_last else 0
    num_in_layer = 2 * num_tokens * _layer_numbers(sizes)
    num_passing = max(num_logits, num_in_layer, sizes.num_stage_weights[stage])
    return num_in_flight * kept + num_passing * plan.number_bytes


def saved_bytes(
    sizes: ModelSizes,
    number_bytes: int,
    *,
    num_tokens: int,
    stage: int = 0,
    num_trained: int | None = None,
) -> int:
    """What autograd keeps of one micro-step of `num_tokens` in lines of their own, of which
    `num_trained` (None: all) are trained. A branch of a tree keeps its ancestors' keys and values
    again, and a mask: that is not counted."""
    is_last = stage == sizes.num_stages - 1
    num = num_tokens * (_layer_numbers(sizes) * sizes.num_stage_layers[stage] + 2 * sizes.head_dim)
    ids_bytes = 2 * num_tokens * _ID_BYTES
    if is_last:
        num_trained = num_tokens if num_trained is None else num_trained
        num += num_tokens * (2 * sizes.hidden + 1)
        num += num_trained * (sizes.vocabulary + sizes.hidden)
        ids_bytes += 2 * num_trained * _ID_BYTES
    return num * number_bytes + ids_bytes


def _layer_numbers(sizes: ModelSizes) -> int:
    """For one token. Each of two norms: what comes in, what is scaled, what goes out, a root.
    Attention: queries, keys, values, their mixture twice, a normaliser for each head. MLP: gate,
    its activation, up, their product. Norms of heads: what comes in, what is scaled, a root."""
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    norms = 2 * (3 * sizes.hidden + 1)
    attention = 3 * queries + 2 * keys + sizes.num_heads
    of_heads = 2 * (queries + keys) + sizes.num_heads + sizes.num_kv_heads
    return norms + attention + 4 * sizes.intermediate + sizes.has_head_norms * of_heads


def _num_frozen(sizes: ModelSizes, plan: MemoryPlan) -> int:
    return sum(sizes.num_stage_weights) if plan.keeps_reference else 0


def _optimizer_bytes(sizes: ModelSizes, plan: MemoryPlan) -> int:
    """From the first update on."""
    return plan.is_core * _NUM_MOMENTS * sum(sizes.num_stage_weights) * plan.number_bytes


def _exposed_bytes(sizes: ModelSizes, plan: MemoryPlan) -> int:
    """The core's weights as they are and as they were published, and of both ends the gradient of
    what is tied; or a member's sums."""
    num_trained = sum(sizes.num_stage_weights)
    num_sums = plan.exposes_sums * num_trained
    num = num_trained + 2 * sizes.num_tied if plan.is_core else num_sums
    return _NUM_EXPOSED * num * plan.number_bytes


def _whole(held: MemoryHeld) -> MemoryHeld:
    return replace(held, resident_bytes=held.needed_bytes)
