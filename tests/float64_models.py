"""Small models that compute in float64 throughout, so that 1e-9 means something."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

RMSNorm = LlamaRMSNorm | MistralRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm
Model = TypeVar("Model", bound=nn.Module)


class _DoubleNorm(nn.Module):
    """RMSNorm without the cast to float32 that would hide what a test measures."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden * scale


def in_float64(model: Model) -> Model:
    """`model` itself, in evaluation mode."""
    model.double().eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm):
            model.set_submodule(name, _DoubleNorm(module))
    return model
