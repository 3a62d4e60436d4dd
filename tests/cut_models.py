"""Tiny models, micro-steps for them, and stages joined by hand."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from opengyre.seams.cells import MicroStep
from opengyre.trainer.stage_model import StageModel
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.bundles import Layout, bundles_of
from tests.random_trees import random_selection, random_tree, rows_of

VOCABULARY = 40
TEMPERATURE = 0.7
CUTTABLE = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def config_of(kind: str, **changes: Any) -> Any:
    sizes = {**SIZES, "sliding_window": None} if kind == "mistral" else SIZES
    return CUTTABLE[kind](**{**sizes, **changes})


def model_of(config: Any, *, seed: int = 1) -> Any:
    """In float32, with weights drawn anew, norms and biases too, so that none is neutral."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def micro_step_of_tree(layout: Layout, *, seed: int = 3, number: int = 0) -> MicroStep:
    """Two random executions."""
    numbers = np.random.default_rng(seed)
    rows = [
        row
        for name in ("e1", "e2")
        for row in rows_of(
            random_selection(random_tree(numbers, num_turns=6), numbers), execution=name
        )
    ]
    bundles = bundles_of(rows, layout=layout, budget_tokens=1)
    return micro_step(bundles, step=0, number=number, version=0)


def targets_of(step: MicroStep) -> Tensor:
    return torch.cat([torch.arange(a, b) for path in step.paths for a, b in path.trained])


def coefficients_of(targets: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """What each logprob counts in the sums whose gradients are compared."""
    numbers = torch.Generator().manual_seed(5)
    return torch.randn(len(targets), generator=numbers, dtype=torch.float64).to(dtype)


def logprobs_by_path(model: Any, step: MicroStep) -> Tensor:
    """Of all trained tokens, path by path, each by the model's own forward of its whole line."""
    ids, found = torch.tensor(step.token_ids), []
    for path in step.paths:
        line = [i for a, b in path.pieces for i in range(a, b)]
        logits = model(input_ids=ids[line][None], use_cache=False).logits[0, :-1]
        told = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[line][1:, None])[:, 0]
        found += [told[line.index(i) - 1] for a, b in path.trained for i in range(a, b)]
    return torch.stack(found)


def gradients_by_path(model: Any, step: MicroStep) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradient of their weighted sum by name."""
    model.zero_grad()
    logprobs = logprobs_by_path(model, step)
    (logprobs * coefficients_of(logprobs, logprobs.dtype)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach(), gradients


def gradients_of_stages(
    stages: Sequence[StageModel], step: MicroStep
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same through stages that are in training, forwards and then backwards along the chain.
    A name on two stages has the sum of its gradients if they are different tensors."""
    targets, received, made = targets_of(step), [None], []
    for stage in stages:
        made.append(stage.run(step, received[-1], targets))
        received.append(made[-1].detach().requires_grad_())
    (made[-1] * coefficients_of(targets, made[-1].dtype)).sum().backward()
    for index in range(len(stages) - 1, 0, -1):
        made[index - 1].backward(received[index].grad)
    total: dict[str, Tensor] = {}
    for parameter, name in {p: n for one in stages for n, p in one.parameters.items()}.items():
        if parameter.grad is not None:
            before = total.get(name, torch.zeros_like(parameter))
            total[name] = before + parameter.grad
            parameter.grad = None
    return made[-1].detach(), total


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all names, relative to the largest number; names must be the same."""
    assert ours.keys() == theirs.keys()
    scale = max(float(one.abs().max()) for one in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / scale
