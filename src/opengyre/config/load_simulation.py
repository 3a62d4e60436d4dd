"""From a scenario file (and `--set`) to a SimulationConfig.

Owns: reading, `extends`, and refusing in words. Must not know: what the values mean.
Invariant: a refusal names the full key, the value, and what was expected, one line per problem.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from opengyre.config.load import read_toml
from opengyre.config.overrides import Table, apply_override
from opengyre.config.simulation import MAX_NAME_CHARS, SimulationConfig, simulation_problems
from opengyre.config.words import problem_lines
from opengyre.seams.errors import ConfigError

MAX_DEPTH = 4


def load_simulation(path: Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Read `path` over what it extends, apply `overrides` in order, check everything.

    Relative paths start at the folder of `path`. Raises ConfigError, one line for each problem.
    """
    table = _read_with_bases(path, ())
    section = table.setdefault("scenario", {})
    if isinstance(section, dict):
        section.setdefault("name", _name_of(path))
    for override in overrides:
        apply_override(table, override)
    return _check(table, path)


def _name_of(path: Path) -> str:
    """The file's name, as far as it can stand in a table."""
    printable = "".join(one if one.isprintable() else "?" for one in path.stem)
    return printable[:MAX_NAME_CHARS]


def scenario_files(folder: Path) -> list[Path]:
    """The scenario files of a folder, by name; those that others extend are no scenarios.

    Raises ConfigError if there is none.
    """
    bases: set[Path] = set()
    files = sorted(folder.glob("*.toml"))
    for path in files:
        if base := _base_of(path, read_toml(path)):
            bases.add(base.resolve())
    found = [path for path in files if path.resolve() not in bases]
    if not found:
        raise ConfigError(f"{folder}: no scenario file (*.toml) in this folder")
    return found


def _read_with_bases(path: Path, above: tuple[Path, ...]) -> Table:
    """`above`: the files that led here, each by the `extends` of the one before."""
    chain = (*above, path)
    if path.resolve() in {one.resolve() for one in above}:
        raise ConfigError(f"{' -> '.join(map(str, chain))}: expected no circle of extends")
    if len(above) > MAX_DEPTH:
        raise ConfigError(f"{path}: expected at most {MAX_DEPTH} extends in a row")
    table = read_toml(path)
    base = _base_of(path, table)
    table.pop("extends", None)
    if base is None:
        return table
    try:
        below = _read_with_bases(base, chain)
    except ConfigError as error:
        raise ConfigError(str(error) if above else f"{path}: extends: {error}") from error
    return _merged(below, table)


def _base_of(path: Path, table: Table) -> Path | None:
    name = table.get("extends")
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigError(f'{path}: extends = {name}: expected a path in "quotes"')
    if not name or "\0" in name:
        raise ConfigError(f"{path}: extends = {name!r}: expected the path of a scenario file")
    return path.parent / name


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> Table:
    """Tables are joined key by key; any other value above replaces the one below."""
    result: Table = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            result[key] = _merged(under, value)
        else:
            result[key] = value
    return result


def _check(table: Table, path: Path) -> SimulationConfig:
    try:
        text = json.dumps(table, default=str)
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise ConfigError(f"{path}: expected values of a usual size: {error}") from error
    try:
        config = SimulationConfig.model_validate_json(
            text, context={"folder": path.resolve().parent}
        )
    except ValidationError as error:
        problems = problem_lines(error.errors(include_url=False), SimulationConfig)
    else:
        problems = simulation_problems(config)
        if not problems:
            return config
    raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
