"""A RunConfig as TOML text, for people.

Owns: the spelling. Must not know: which keys exist.
Invariant: reading the text again gives the same config; a key without a value is left out.
"""

import json
from collections.abc import Iterator
from typing import Any

from opengyre.config.root import RunConfig


def resolved_toml(config: RunConfig) -> str:
    """Every key with the value in force, as a TOML file; ends with a newline."""
    return "\n".join(_tables(config.model_dump(mode="json"))).lstrip("\n") + "\n"


def _tables(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        header = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _table(value, header, f"[{header}]")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                yield from _table(item, header, f"[[{header}]]")


def _table(table: dict[str, Any], header: str, opening: str) -> Iterator[str]:
    yield f"\n{opening}"
    for name, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
    yield from _tables(table, f"{header}.")
