"""The tree of known keys, read off the models: for suggestions and for `gyre config schema`.

Owns: walking the models. Must not know: values.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One settable key: its full spelling (`[]` marks a list of tables) and its field."""

    path: str
    field: FieldInfo


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All leaves below `model`, in the order of the file."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is None:
            yield Key(path=prefix + name, field=field)
        else:
            mark = "[]" if _is_sequence(field.annotation) else ""
            yield from walk(inner, f"{prefix}{name}{mark}.")


def known_keys(model: type[BaseModel]) -> list[str]:
    return [key.path for key in walk(model)]


def model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    """The model whose fields `loc` leads to, or None."""
    here: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(part) if here else None
        here = _model_in(field.annotation) if field else None
    return here


def _is_sequence(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `M`, `M | None` or `tuple[M, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple):
        found = (_model_in(part) for part in typing.get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None
