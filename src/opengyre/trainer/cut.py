"""A decoder cut by layers: the part of one pipeline stage, with the whole model's names.

Owns: the modules of a part, and reading no more than a part from a model folder. Must not know
losses, steps or processes. Invariants: the parts of all stages, joined, compute what the whole
model computes; a part from a folder never holds another stage's weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep
from opengyre.seams.errors import ConfigError
from opengyre.trainer.layers import layers_of_stage, refuse_uncuttable
from opengyre.trainer.model_files import fill_from
from opengyre.trainer.packed_model import ATTENTION, Lines, chosen_logprobs, predecessors
from opengyre.trainer.stage_memory import bytes_of
from opengyre.trainer.stage_model import TrainingRole, flat_tensors


class CutModule(nn.Module):
    """The modules of one stage, shared with `full`, under the names they have there."""

    def __init__(self, full: Any, *, stage: int, num_stages: int) -> None:
        super().__init__()
        layers = layers_of_stage(len(full.model.layers), stage=stage, num_stages=num_stages)
        self.config = full.config
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.model = nn.Module()
        self.is_tied = full.lm_head.weight is full.model.embed_tokens.weight
        if self.is_first or (self.is_last and self.is_tied):
            self.model.embed_tokens = full.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(i): full.model.layers[i] for i in layers})
        self.model.rotary_emb = full.model.rotary_emb
        if self.is_last:
            self.model.norm = full.model.norm
            self.lm_head = full.lm_head

    def forward(
        self, states: Tensor, positions: Tensor, lines: Lines, kept: Tensor | None
    ) -> Tensor:
        """`states` are token ids [T] on the first stage, else hidden states [T, hidden]. Returns
        hidden states, on the last stage logits [M, vocabulary] after the tokens at `kept` [M]."""
        decoder: Any = self.model
        hidden = decoder.embed_tokens(states[None]) if self.is_first else states[None]
        rotary = decoder.rotary_emb(hidden, positions[None])
        for layer in decoder.layers.values():
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions[None],
                position_embeddings=rotary,
                use_cache=False,
                lines=lines,
            )
        output: Tensor = hidden[0]
        if self.is_last:
            output = self.lm_head(decoder.norm(hidden)[0][kept])
        return output


class Cut:
    """StageModel of `module`. `whole` is the model that holds its weights too; None: nothing else
    does."""

    def __init__(
        self, module: CutModule, *, temperature: float, whole: nn.Module | None = None
    ) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        self._temperature = temperature
        self._is_own = whole is None
        self._holder = whole or module
        self._role = TrainingRole(module, module.config, attention=ATTENTION)

    @property
    def weights_bytes(self) -> int:
        return bytes_of(self._holder.parameters())

    def enter(self) -> None:
        """Raises InvariantError while the weights are released: reading them would crash."""
        if any(one.untyped_storage().size() == 0 for one in self.parameters.values()):
            raise InvariantError("released weights enter training")
        self._role.enter()

    def leave(self) -> None:
        self._role.leave()

    def release(self) -> None:
        if self._is_own:
            for parameter in self.parameters.values():
                parameter.untyped_storage().resize_(0)

    def acquire(self) -> None:
        for parameter in self.parameters.values():
            storage = parameter.untyped_storage()
            if self._is_own and storage.size() == 0:
                storage.resize_(parameter.numel() * parameter.itemsize)
                parameter.detach().fill_(torch.nan)

    def run(self, micro_step: MicroStep, received: Tensor | None, targets: Tensor) -> Tensor:
        return self._run(self.module, micro_step, received, targets)

    def run_with(
        self,
        weights: Mapping[str, Tensor],
        micro_step: MicroStep,
        received: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        def module(*inputs: Any) -> Any:
            return functional_call(self.module, dict(weights), inputs)

        return self._run(module, micro_step, received, targets)

    def _run(
        self,
        module: Callable[..., Any],
        micro_step: MicroStep,
        received: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        if self.module.is_first is not (received is None):
            raise InvariantError("the first stage receives nothing, any other hidden states")
        device = next(iter(self.parameters.values())).device
        token_ids, positions = flat_tensors(micro_step, device)
        segments = micro_step.segments
        kept = predecessors(segments, targets) if self.module.is_last else None
        states = token_ids if received is None else received
        output: Tensor = module(states, positions, Lines(segments, device), kept)
        if not self.module.is_last:
            return output
        return chosen_logprobs(output, token_ids[targets], self._temperature)


def cut_of(module: Any, *, stage: int, num_stages: int, temperature: float) -> Cut:
    """The part of `stage`, made of the modules of a whole model in memory, which keeps them.

    Raises ConfigError for a model that cannot be cut so.
    """
    refuse_uncuttable(module.config, num_stages)
    cut = CutModule(module, stage=stage, num_stages=num_stages)
    return Cut(cut, temperature=temperature, whole=module)


def load_cut(
    folder: str | Path,
    *,
    stage: int,
    num_stages: int,
    dtype: torch.dtype,
    device: torch.device | str,
    temperature: float,
) -> Cut:
    """The part of `stage` of the model in `folder`; the rest is neither made nor read.

    Raises ConfigError for a model that cannot be cut so or files that do not fit its config.
    """
    path = Path(folder)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        words = str(error).strip().split("\n")[0]
        raise ConfigError(f"model {path} cannot be loaded: {words}") from error
    refuse_uncuttable(config, num_stages)
    causal: Any = AutoModelForCausalLM
    with torch.device("meta"):
        full = causal.from_config(config, dtype=dtype)
    cut = CutModule(full, stage=stage, num_stages=num_stages)
    _materialise(cut, config, device)
    fill_from(path, {name: one.detach() for name, one in cut.named_parameters()})
    return Cut(cut.eval(), temperature=temperature)


def _materialise(cut: CutModule, config: Any, device: torch.device | str) -> None:
    """From the meta device to memory, which is not yet written; rotary angles are computed anew."""
    decoder: Any = cut.model
    rotary = type(decoder.rotary_emb)
    cut.to_empty(device=device)
    decoder.rotary_emb = rotary(config).to(device)
    if cut.is_last and cut.is_tied:
        cut.lm_head.weight = decoder.embed_tokens.weight
