"""How many trained tokens each objective cuts, by how far the policy has moved since sampling.

`python benchmarks/objectives.py` prints the table of docs/objectives.md. A drift of d: a path's
tokens move in log-probability by d in common (normal over paths) and by 10 d each (normal over
tokens), as a small update moves many tokens a little and some a lot.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from opengyre.config.objectives import OBJECTIVE_DEFAULTS, defaults_of
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy, Trained

DRIFTS = (0.0001, 0.001, 0.01, 0.1)
NUM_PATHS = 100
PATH_TOKENS = 250
TOKEN_DRIFT = 10.0


def batch(drift: float, seed: int = 5) -> tuple[Tensor, Trained]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = torch.arange(NUM_PATHS).repeat_interleave(PATH_TOKENS)
    lengths = torch.full((NUM_PATHS,), PATH_TOKENS, dtype=torch.float64)
    moved = drift * (normal(NUM_PATHS)[rows] + TOKEN_DRIFT * normal(len(rows)))
    trained = Trained(
        logp_rollout=torch.full((len(rows),), -1.0, dtype=torch.float64),
        path_of_token=rows,
        advantages=normal(NUM_PATHS),
        num_path_tokens=lengths,
        num_execution_tokens=lengths,
    )
    return trained.logp_rollout + moved, trained


def cut_share(name: str, old: OldPolicy, drift: float) -> float:
    own = defaults_of(name)
    settings = ObjectiveSettings(old=old, clip_low=own.clip_low, clip_high=own.clip_high)
    logp_new, trained = batch(drift)
    return OBJECTIVES[name](logp_new, trained, settings).num_cut / len(logp_new)


def table() -> Iterator[str]:
    """Lines of Markdown."""
    torch.set_num_threads(1)
    yield "| objective | old | " + " | ".join(f"drift {drift:g}" for drift in DRIFTS) + " |"
    yield "|---|---|" + "---|" * len(DRIFTS)
    for name in OBJECTIVE_DEFAULTS:
        for old in OldPolicy:
            shares = [f"{100 * cut_share(name, old, drift):.1f} %" for drift in DRIFTS]
            yield f"| {name} | {old} | " + " | ".join(shares) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
