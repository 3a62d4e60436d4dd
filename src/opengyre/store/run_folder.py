"""The run folder: what lies where, made whole or not at all.

Owns: names inside the folder, config.json, metrics.jsonl, summary.json. Must not know: what the
files mean. Invariants: an existing run is never written over; a folder with a config.json is
complete; small files are replaced by rename.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.store.segments import sync_folder

MIN_FREE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def db(self) -> Path:
        return self.path / "run.db"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What child processes write to stderr."""
        return self.path / "logs"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_png(self) -> Path:
        return self.path / "report.png"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One JSON line; a number that is not finite becomes null. Not synced."""
        line = msgspec.json.encode(dict(row)) + b"\n"
        with self.metrics_jsonl.open("ab") as file:
            file.write(line)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_json, summary)


def create_run_folder(
    path: Path, config: Mapping[str, Any], *, min_free_bytes: int = MIN_FREE_BYTES
) -> RunFolder:
    """Make `path` with its folders and config.json. Nothing is left behind on failure.

    Raises ConfigError: something is there already, no space, or the place cannot be written.
    """
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        what = "holds a run already" if (path / "run.db").exists() else "exists and is not empty"
        raise ConfigError(f"{path}: {what}; name another run folder or remove it")
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    check_free_space(existing, min_free_bytes)
    partial = path.absolute().with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        for name in ("tokens", "checkpoints", "logs"):
            (partial / name).mkdir(parents=True)
        write_json(partial / "config.json", config)
        partial.rename(path)
        sync_folder(path.absolute().parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot make the run folder: {reason}") from error
    return RunFolder(path)


def open_run_folder(path: Path) -> RunFolder:
    """An existing run. Raises ConfigError if `path` is none."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    if not (path / "run.db").is_file():
        raise ConfigError(f"{path}: not a run folder (no run.db in it)")
    return RunFolder(path)


def check_free_space(folder: Path, min_free_bytes: int) -> None:
    """Raises ConfigError when the file system of `folder` has less than `min_free_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < min_free_bytes:
        have, need = free_bytes // 2**20, -(-min_free_bytes // 2**20)
        raise ConfigError(f"{folder}: {have} MiB free, a run needs {need} MiB; make space there")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by indented JSON, durably."""
    body = msgspec.json.format(msgspec.json.encode(dict(value)), indent=2) + b"\n"
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is not there, BoundaryError if it is not JSON."""
    try:
        value: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except msgspec.MsgspecError as error:
        raise BoundaryError("run folder", f"{path}: {error}", retryable=False) from error
    return value
