"""A causal language model over each line by itself, with the model's own attention.

Owns: nothing. Must not know losses or steps. Invariants: exact for any model that is causal; what
lines share is computed once for each; every trained token of every path has its logprob.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opengyre.seams.cells import Range, TrainedPath
from opengyre.trainer.packed_model import chosen_logprobs


def logprobs_alone(
    model: Any,
    *,
    token_ids: Tensor,
    paths: Sequence[TrainedPath],
    targets: Tensor,
    temperature: float,
    keeps_logits: bool,
) -> Tensor:
    """Logprob of each token at flat position `targets` [M] given its line so far, shape [M].

    `token_ids` [T]; `targets` are among what `paths` train. `keeps_logits`: the model computes
    logits only where it is asked to, see `can_keep_logits`.
    """
    positions = torch.arange(len(token_ids), device=token_ids.device)
    place = torch.empty_like(positions)
    found: list[Tensor] = []
    trained = [one for one in paths if one.trained]
    for path in trained:
        line, wanted = _flat(positions, path.pieces), _flat(positions, path.trained)
        place[line] = positions[: len(line)]
        inputs: dict[str, Any] = {"input_ids": token_ids[line][None], "use_cache": False}
        before = place[wanted] - 1
        if keeps_logits:
            logits = model(**inputs, logits_to_keep=before).logits[0]
        else:
            logits = model(**inputs).logits[0, before]
        found.append(chosen_logprobs(logits, token_ids[wanted], temperature))
    where = torch.cat([_flat(positions, path.trained) for path in trained])
    logprobs = torch.cat(found)
    return logprobs.new_zeros(len(token_ids)).index_put((where,), logprobs)[targets]


def can_keep_logits(module: Any) -> bool:
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def _flat(positions: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([positions[start:end] for start, end in ranges])
