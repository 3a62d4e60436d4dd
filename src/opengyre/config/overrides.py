"""`--set a.b=c`: one value of a config, spelled as in TOML, bare words being strings.

Owns: the syntax. Must not know: which keys exist (the models check that afterwards).
"""

import re
import tomllib
from typing import Any

from opengyre.seams.errors import ConfigError

_PART = re.compile(r"([A-Za-z0-9_-]+)(?:\[(\d{1,9})\])?")

Table = dict[str, Any]


def parse_value(text: str) -> Any:
    """`8` is an integer, `true` a boolean, `[1, 2]` a list; what is no TOML value is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError) as error:  # ValueError: thousands of digits
        raise ConfigError(f"--set: expected a value of a usual size: {error}") from error
    return parsed["value"] if set(parsed) == {"value"} else text


def parse_key(key: str) -> list[str | int]:
    """`tasks[0].path` -> ["tasks", 0, "path"]. Raises ConfigError if it is not spelled so."""
    parts: list[str | int] = []
    for word in key.split("."):
        match = _PART.fullmatch(word)
        if match is None:
            raise ConfigError(f"--set {key}: expected a key like schedule.group_size=8")
        parts.append(match[1])
        if match[2] is not None:
            parts.append(int(match[2]))
    return parts


def apply_override(table: Table, override: str) -> None:
    """Put `a.b=c` into `table` in place, making tables on the way. Raises ConfigError."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"--set {override}: expected key=value, as in schedule.group_size=8")
    *way, last = parse_key(key)
    place: Any = table
    for part in way:
        place = _step_into(place, part, key)
    _put(place, last, value=parse_value(text.strip()), key=key)


def _step_into(place: Any, part: str | int, key: str) -> Any:
    if isinstance(part, str) and isinstance(place, dict):
        return place.setdefault(part, {})
    if isinstance(part, int) and isinstance(place, list) and part < len(place):
        return place[part]
    raise ConfigError(f"--set {key}: no such place in the file (at {part})")


def _put(place: Any, last: str | int, *, value: Any, key: str) -> None:
    is_table = isinstance(last, str) and isinstance(place, dict)
    is_list = isinstance(last, int) and isinstance(place, list) and last < len(place)
    if not is_table and not is_list:
        raise ConfigError(f"--set {key}: no such place in the file (at {last})")
    place[last] = value
