"""The size of a seeded run, and its config.

Owns: what is drawn of a run's shape. Must not know: what happens in it. Invariant: small enough
that many runs fit into a minute.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from opengyre.config.root import RunConfig
from opengyre.control.config import EngineSpec, SchedulerConfig
from tests.sim.seeded_policy import MODEL


def is_branching(seed: int) -> bool:
    """Agents begin anew and go back, and one path of each is trained. No seed that once broke."""
    return seed % 12 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a run, drawn from its seed; small, so that many fit into a minute."""

    num_cells: int
    slots_per_cell: int
    slots_per_standalone: int
    num_steps: int
    steps_per_burst: int
    run_ahead: int
    num_eval: int
    tokens_per_s: float
    micro_step_tokens: int
    oversample: float = 1.0
    filter_zero_variance: bool = False
    max_paths: int = 5
    may_group: bool = False

    @classmethod
    def draw(cls, rng: Random, seed: int) -> "Shape":
        """Every sixth world filters groups: none of the seeds that once broke is one. In more than
        half of all, cells reduce together."""
        shape = cls(
            num_cells=rng.choice([2, 2, 3]),
            slots_per_cell=rng.choice([2, 3, 4]),
            slots_per_standalone=rng.choice([4, 6, 8]),
            num_steps=rng.choice([3, 4]),
            steps_per_burst=rng.choice([1, 2, 2]),
            run_ahead=rng.choice([0, 1, 1]),
            num_eval=rng.choice([0, 0, 0, 1]),
            tokens_per_s=rng.choice([2.0, 5.0, 20.0]),
            micro_step_tokens=rng.choice([40, 40, 40, 8192]),
        )
        shape = replace(shape, may_group=Random(f"groups/{seed}").random() < 0.6)
        if seed % 6 != 1:
            return shape
        oversample = Random(f"sieve/{seed}").choice([1.0, 1.5, 2.0])
        max_paths = 1 if is_branching(seed) else shape.max_paths
        return replace(shape, oversample=oversample, filter_zero_variance=True, max_paths=max_paths)

    def scheduler(self) -> SchedulerConfig:
        cells = tuple(
            EngineSpec(engine=f"c{k}", slots=self.slots_per_cell, cell=k)  # type: ignore[arg-type]
            for k in range(self.num_cells)
        )
        standalone = EngineSpec(engine="s0", slots=self.slots_per_standalone, cell=None)  # type: ignore[arg-type]
        return SchedulerConfig(
            num_cells=self.num_cells,
            engines=(*cells, standalone),
            num_steps=self.num_steps,
            group_size=2,
            groups_per_step=2,
            steps_per_burst=self.steps_per_burst,
            run_ahead=self.run_ahead,
            oversample=self.oversample,
            filter_zero_variance=self.filter_zero_variance,
            supply_fraction=0.5,
            supply_hold_s=0.2,
            min_valid_members=1,
            max_void_in_a_row=50,
            recall_after_s=15.0,
            join_deadline_s=10.0,
            publish_timeout_s=30.0,
            num_eval_executions=self.num_eval,
            eval_at_end=self.num_eval > 0,
            eval_deadline_s=60.0,
            is_strict=True,
        )


def run_config(shape: Shape, *, num_gateways: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"dir": Path("/nowhere"), "num_steps": shape.num_steps},
            "model": {"path": str(MODEL)},
            "tasks": ({"path": Path("/nowhere")},),
            "topology": {
                "num_cells": shape.num_cells,
                "slots_per_cell": shape.slots_per_cell,
                "slots_per_standalone": shape.slots_per_standalone,
                "engine": "scripted",
                "cell": "emulated",
            },
            "schedule": {
                "group_size": 2,
                "groups_per_step": 2,
                "steps_per_burst": shape.steps_per_burst,
                "run_ahead": shape.run_ahead,
                "oversample": shape.oversample,
                "filter_zero_variance": shape.filter_zero_variance,
            },
            "sampling": {"max_new_tokens": 64, "context_tokens": 400},
            "training": {
                "micro_step_tokens": shape.micro_step_tokens,
                "max_paths": shape.max_paths,
            },
            "harness": {"timeout_s": 120.0},
            "gateway": {"num_processes": num_gateways},
        }
    )
