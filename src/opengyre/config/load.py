"""From a TOML file (and `--set`) to a RunConfig, and back to JSON.

Owns: reading, and refusing in words. Must not know: what the values mean.
Invariant: a refusal names the full key, the value, and what was expected, one line per problem.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opengyre.config.base import Section
from opengyre.config.overrides import Table, apply_override
from opengyre.config.root import RunConfig, find_problems
from opengyre.config.words import problem_lines
from opengyre.seams.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply `overrides` in order, check everything.

    Relative paths, also those in `overrides`, are resolved against the folder of `path`.
    Raises ConfigError with one line for each problem.
    """
    table = read_toml(path)
    run = table.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    for override in overrides:
        apply_override(table, override)
    return _check(table, source=str(path), folder=path.resolve().parent)


def parse_resolved(text: str) -> RunConfig:
    """The inverse of `resolved_json`. Raises ConfigError if the text is not such a config."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config.json: not JSON: {error}") from error
    return _check(table, source="config.json", folder=None)


def resolved_json(config: RunConfig) -> str:
    """Every key with the value in force, for the run folder; ends with a newline."""
    return config.model_dump_json(indent=2) + "\n"


def config_schema(model: type[Section] = RunConfig) -> dict[str, Any]:
    """JSON schema of a config file, or of another file whose root is `model`."""
    return model.model_json_schema()


def read_toml(path: Path) -> Table:
    """The file as tables. Raises ConfigError if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected a TOML file in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: expected fewer brackets inside each other") from error
    except ValueError as error:  # a path with a zero byte, an integer of thousands of digits
        raise ConfigError(f"{path}: cannot read the config file: {error}") from error


def _check(table: Any, *, source: str, folder: Path | None) -> RunConfig:
    try:
        config = RunConfig.model_validate_json(
            json.dumps(table, default=str), context={"folder": folder}
        )
    except ValidationError as error:
        problems = problem_lines(error.errors(include_url=False))
    else:
        problems = find_problems(config)
        if not problems:
            return config
    raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
