"""Checkpoints of a run: `checkpoints/step-N/`, whole or not there.

Owns: the manifest, durability, retention. Must not know: what the files hold.
Invariants: the folder gets its name only after every file, the manifest last, is on disk; a
checkpoint that is read was checked against its manifest; clean-up never fails a run.
"""

import logging
import os
import shutil
import zlib
from pathlib import Path

import msgspec

from opengyre.seams.errors import BoundaryError
from opengyre.store.segments import sync_folder

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    num_bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is of, and every file in it. `lineage` counts histories of weights."""

    step: int
    version: int
    lineage: int
    files: list[CheckpointFile]


class Checkpoints:
    """The checkpoints below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to save the files of `step` into; an unfinished one is removed."""
        self.recover()
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, *, version: int, lineage: int = 0) -> Manifest:
        """Make what lies in `begin`'s folder the checkpoint of `step`. It survives kill -9.

        Blocking (reads and syncs every file). A checkpoint of the same step is replaced.
        Raises BoundaryError if there is nothing to commit or the disk fails.
        """
        partial = self._partial(step)
        try:
            names = sorted(one.name for one in partial.iterdir() if one.name != MANIFEST)
            files = [_sync_file(partial / name) for name in names]
            if not files:
                raise _failed(f"{partial} holds no file")
            manifest = Manifest(step=step, version=version, lineage=lineage, files=files)
            (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            _sync_file(partial / MANIFEST)
            sync_folder(partial)
            if self.path(step).exists():
                self.path(step).rename(self._folder / f".step-{step}.replaced")
            partial.rename(self.path(step))
            sync_folder(self._folder)
            self.recover()
        except OSError as error:
            raise _failed(f"{partial}: {error.strerror or error}") from error
        return manifest

    def recover(self) -> None:
        """For the writer alone: undo a replacement that a crash cut in half, and clean up."""
        for old in self._folder.glob(".step-*.replaced"):
            name = old.name.removeprefix(".").removesuffix(".replaced")
            if (self._folder / name).exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(self._folder / name)

    def steps(self) -> list[int]:
        """Steps of whole checkpoints, oldest first."""
        found = self._folder.glob(f"step-*/{MANIFEST}")
        return sorted(int(one.parent.name[5:]) for one in found if one.parent.name[5:].isdigit())

    def check(self, step: int) -> Manifest:
        """Read the manifest and compare every file with it. Raises BoundaryError."""
        folder = self.path(step)
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
            for file in manifest.files:
                if _describe(folder / file.name) != file:
                    raise _failed(f"{folder / file.name}: differs from its manifest")
        except (OSError, msgspec.MsgspecError) as error:
            raise _failed(f"{folder}: {error}") from error
        return manifest

    def retain(self, keep: int, *, protect: frozenset[int] = frozenset()) -> list[int]:
        """Remove all but the newest `keep` (at least 1) and `protect`; returns what was removed.

        What cannot be removed is logged and stays.
        """
        removed = []
        for step in self.steps()[: -max(1, keep)]:
            if step in protect:
                continue
            try:
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))
            except OSError as error:
                _log.warning("checkpoint step-%d cannot be removed: %s", step, error)
                continue
            removed.append(step)
        return removed

    def _partial(self, step: int) -> Path:
        return self._folder / f".step-{step}.partial"


def _describe(path: Path) -> CheckpointFile:
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return CheckpointFile(name=path.name, num_bytes=size, crc32=crc)


def _sync_file(path: Path) -> CheckpointFile:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return _describe(path)


def _failed(reason: str) -> BoundaryError:
    return BoundaryError("checkpoint", reason, retryable=False)
