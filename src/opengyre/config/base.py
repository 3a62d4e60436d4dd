"""What every config model shares: frozen, closed, strict, and paths that know their folder.

Owns: the base model and the path types. Must not know: which sections exist.
Invariant: a relative path is resolved once, against the folder of the TOML file it came from.
"""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

from opengyre.trajectory.shaping import BuiltIn

PROFILES = Path(__file__).with_name("profiles")
SHIPPED_HARNESSES = tuple(sorted(path.stem for path in PROFILES.glob("*.toml")))
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error
    return pattern


Regex = Annotated[str, AfterValidator(_checked_regex)]


class Section(BaseModel):
    """One component's settings: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


def _folder(info: ValidationInfo) -> Path | None:
    folder = (info.context or {}).get("folder")
    return folder if isinstance(folder, Path) else None


def _absolute(path: Path, folder: Path) -> Path:
    try:
        return Path(folder, path.expanduser()).resolve()
    except RuntimeError as error:  # a home that nobody has, or links in a circle
        raise ValueError(f"expected a path that leads somewhere: {error}") from error


def _resolve(path: Path, info: ValidationInfo) -> Path:
    if "\0" in str(path):
        raise ValueError("expected a path without a zero byte")
    folder = _folder(info)
    return path if folder is None else _absolute(path, folder)


def _resolve_model(name: str, info: ValidationInfo) -> str:
    """A folder becomes absolute; a name spelled `owner/name` that is no folder is a hub id."""
    if not name.strip():
        raise ValueError("must not be empty")
    folder = _folder(info)
    if folder is None:
        return name
    path = _absolute(Path(name), folder)
    if _HUB_ID.fullmatch(name) and not path.exists():
        return name
    return str(path)


def _resolve_callable(name: str, info: ValidationInfo) -> str:
    """`file.py:function` gets an absolute file; `module:function` stays as it is."""
    target, colon, function = name.rpartition(":")
    if not colon or not target or not function.isidentifier():
        raise ValueError("expected file.py:function or module:function")
    if not target.endswith(".py"):
        return name
    return f"{_resolve(Path(target), info)}:{function}"


def _resolve_transform(name: str, info: ValidationInfo) -> str:
    """A built-in transform's name stays as it is."""
    if name in tuple(BuiltIn):
        return name
    if ":" not in name:
        raise ValueError(f"expected {', '.join(BuiltIn)}, file.py:function or module:function")
    return _resolve_callable(name, info)


def _resolve_harness(name: str, info: ValidationInfo) -> str:
    """A shipped profile's name stays as it is; the path of a profile file becomes absolute."""
    if name.endswith(".toml"):
        return str(_resolve(Path(name), info))
    if name not in SHIPPED_HARNESSES:
        known = ", ".join(SHIPPED_HARNESSES)
        raise ValueError(f"expected one of {known}, or the path of a .toml file")
    return name


ConfigPath = Annotated[Path, AfterValidator(_resolve)]
ModelPath = Annotated[str, AfterValidator(_resolve_model)]
CallablePath = Annotated[str, AfterValidator(_resolve_callable)]
TransformName = Annotated[str, AfterValidator(_resolve_transform)]
HarnessName = Annotated[str, AfterValidator(_resolve_harness)]
