"""What `gyre plan` plans for: a scenario file, or recorded durations and values beside them.

Owns: from a path, overrides and a device budget to a SimulationConfig. Must not know: layouts,
searches. Invariant: a refusal names the key or the option, and what was expected.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from opengyre.config.load_simulation import load_simulation
from opengyre.config.overrides import Table, apply_override
from opengyre.config.simulation import SimulationConfig, simulation_problems
from opengyre.config.words import problem_lines
from opengyre.seams.errors import ConfigError

NUM_STEPS = 24


def load_planning(
    path: Path | None, overrides: Sequence[str], *, num_devices: int | None
) -> SimulationConfig:
    """`path`: a scenario, or a CSV file of durations, or None where the overrides say it all.

    Without a scenario file the budget is one cell, until the plan lays it out. Raises ConfigError.
    """
    if path is not None and path.suffix == ".toml":
        return load_simulation(path, overrides)
    if path is not None and path.suffix != ".csv":
        raise ConfigError(f"{path}: expected a scenario (*.toml) or durations (*.csv)")
    if num_devices is None:
        raise ConfigError("--devices: expected the device budget, where no scenario file says it")
    table: Table = {
        "scenario": {"name": path.stem if path else "plan", "num_steps": NUM_STEPS},
        "topology": {"num_cells": 1, "devices_per_cell": num_devices},
        "workload": {"csv": str(path.resolve())} if path else {},
    }
    for override in overrides:
        apply_override(table, override)
    try:
        config = SimulationConfig.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        problems = problem_lines(error.errors(include_url=False), SimulationConfig)
    else:
        problems = simulation_problems(config)
        if not problems:
            return config
    name = "--set" if path is None else str(path)
    raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
