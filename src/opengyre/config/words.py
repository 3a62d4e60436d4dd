"""Refusals in words: which key, which value, what was expected, which key may have been meant.

Owns: the wording. Must not know: files. A line reads `schedule.group_size = 0: expected ...`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from opengyre.config.keys import known_keys, model_at
from opengyre.config.root import RunConfig

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": 'a string in "quotes"',
    "path_type": 'a path in "quotes"',
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "letters, digits, dot, dash and underline ({pattern})",
}
_MAX_VALUE_CHARS = 80


def problem_lines(errors: Sequence[ErrorDetails], root: type[BaseModel] = RunConfig) -> list[str]:
    """One line for each error, in the order of the models; what only follows from one is left out.

    `root` is the model of the whole file. Never empty: an error that follows from another comes
    with that other one.
    """
    locs = [error["loc"] for error in errors]
    return [_line(error, root) for error in errors if not _follows(error, locs)]


def _follows(error: ErrorDetails, locs: Sequence[tuple[str | int, ...]]) -> bool:
    """A default that could not be made, or a list that lost its one broken item."""
    if error["type"] == "default_factory_not_called":
        return True
    loc = error["loc"]
    is_inside = (len(other) > len(loc) and other[: len(loc)] == loc for other in locs)
    return error["type"] == "too_short" and any(is_inside)


def _line(error: ErrorDetails, root: type[BaseModel]) -> str:
    key = spell(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{_suggestion(error['loc'], root)}"
        case "missing":
            return f"{key} is missing: expected {_missing(error['loc'], root)}"
        case kind:
            return f"{key} = {_value(error['input'])}: expected {_expectation(kind, error)}"


def spell(loc: Sequence[str | int]) -> str:
    """("tasks", 0, "path") -> `tasks[0].path`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _value(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _expectation(kind: str, error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]).removeprefix("expected ")
    words = _EXPECTED.get(kind)
    return words.format_map(context) if words else error["msg"]


def _missing(loc: Sequence[str | int], root: type[BaseModel]) -> str:
    model = model_at(root, loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    if field is not None and field.description:
        return field.description
    return "a value" if isinstance(loc[-1], int) else "a table of keys"


def _suggestion(loc: Sequence[str | int], root: type[BaseModel]) -> str:
    """The nearest key of the same table, else the nearest of the whole file."""
    name = str(loc[-1])
    model: type[BaseModel] | None = model_at(root, loc[:-1])
    siblings = list(model.model_fields) if model else []
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"; did you mean {spell([*loc[:-1], close[0]])}?"
    keys_by_name = {key.rsplit(".", 1)[-1]: key for key in reversed(known_keys(root))}
    if close := difflib.get_close_matches(name, list(keys_by_name), n=1, cutoff=0.75):
        return f"; did you mean {keys_by_name[close[0]]}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""
