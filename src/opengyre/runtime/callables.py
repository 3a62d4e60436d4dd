"""Loads what a config names as `file.py:function` or `module:function`.

Must not know: what the function is for. Invariants: whatever a user's file raises is one line that
names the key; a file is loaded once, and takes the place of no other module.
"""

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from opengyre.seams.errors import ConfigError


def load_callable(target: str, *, key: str) -> Callable[..., Any]:
    """The function; `key` is where the config names it. Raises ConfigError."""
    place, _, name = target.rpartition(":")
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"{key} = {target}: cannot be loaded: {type(error).__name__}: {words}"
        ) from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{key} = {target}: {place} has no function {name}")
    return found


def _load_file(path: Path) -> ModuleType:
    """A user's file may import its neighbours, as a script may."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's own name, unless a module of another file has it."""
    taken = sys.modules.get(path.stem)
    if taken is None or getattr(taken, "__file__", None) == str(path):
        return path.stem
    return f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
