"""The weight plane on one host: a file per exposure, mapped by readers.

Owns: files named after its slot in one folder (normally below /dev/shm). Must not know what the
tensors mean. Invariants: a file appears whole under its final name and its bytes never change;
at most `num_kept` exposures of a slot exist; a withdrawn file is marked before it is unlinked,
so a reader that still maps it notices; `close` leaves no file.
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from opengyre.seams.weights import Descriptor, TensorSpec
from opengyre.transport import weights
from opengyre.transport.weights import Array

PLANE = "shm"
_MAGIC = b"GYREW001"
_HEADER = struct.Struct("<8sq")
_HEADER_BYTES = weights.ALIGN_BYTES


class SharedMemoryPlane:
    """`slot` names the files of this exposer; two planes of one slot must not live at once.

    `num_kept` exposures stay readable, so that a reader of the last version finishes while the
    next one is exposed.
    """

    def __init__(self, folder: Path, *, slot: str, num_kept: int = 2) -> None:
        self._folder = folder
        self._slot = slot
        self._num_kept = num_kept
        self._num_exposed = 0
        self._kept: list[Path] = []
        self._is_closed = False

    def expose(self, tensors: Mapping[str, Array], version: int) -> Descriptor:
        """Write a new file; the oldest one beyond `num_kept` is withdrawn.

        Raises BoundaryError if the folder has no room, or this was closed.
        """
        if self._is_closed:
            raise weights.gone(f"{self._slot} is closed")
        path = self._folder / f"{self._slot}.{os.getpid()}.{self._num_exposed}.weights"
        self._num_exposed += 1
        part = path.with_suffix(".part")
        try:
            if not self._kept:
                self._withdraw_stale()
            specs = _write(part, tensors, version)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise weights.no_room(f"cannot expose at {path}: {error}") from error
        self._kept.append(path)
        while len(self._kept) > self._num_kept:
            _withdraw(self._kept.pop(0))
        return Descriptor(plane=PLANE, address=str(path), version=version, tensors=specs)

    def pull(self, descriptor: Descriptor, into: Mapping[str, Array]) -> int:
        """Copy in place; after an error `into` is undefined and must not be used."""
        weights.check_targets(descriptor, into)
        try:
            with Path(descriptor.address).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise weights.gone(f"{descriptor.address}: {error}") from error
        with mapped, memoryview(mapped) as view:
            _copy(descriptor, view, into)
        return descriptor.version

    def close(self) -> None:
        """Withdraw everything; nothing is exposed any more. Idempotent."""
        self._is_closed = True
        while self._kept:
            _withdraw(self._kept.pop())

    def _withdraw_stale(self) -> None:
        """Files of an earlier process of this slot that was killed."""
        ours = re.compile(rf"{re.escape(self._slot)}\.\d+\.\d+\.(weights|part)")
        for path in sorted(self._folder.iterdir()):
            if ours.fullmatch(path.name):
                _withdraw(path)


def _write(path: Path, tensors: Mapping[str, Array], version: int) -> list[TensorSpec]:
    num_bytes = _HEADER_BYTES + weights.body_bytes(tensors)
    with path.open("w+b") as file:
        # A sparse file in a full tmpfs would end the process with SIGBUS on first touch.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        with mmap.mmap(file.fileno(), num_bytes) as mapped, memoryview(mapped) as view:
            with view[_HEADER_BYTES:] as body:
                specs = weights.lay_out(tensors, body)
            _HEADER.pack_into(view, 0, _MAGIC, version)
    return specs


def _copy(descriptor: Descriptor, view: memoryview, into: Mapping[str, Array]) -> None:
    end = max((spec.offset_bytes + spec.num_bytes for spec in descriptor.tensors), default=0)
    if len(view) < _HEADER_BYTES + end:
        raise weights.torn("the file is too short")
    weights.check_version(descriptor, _read_version(view), "before")
    for spec in descriptor.tensors:
        if spec.name not in into:
            continue
        start = _HEADER_BYTES + spec.offset_bytes
        with weights.bytes_of(into[spec.name]) as target:
            target[:] = view[start : start + spec.num_bytes]
            weights.check_tensor(spec, target)
    weights.check_version(descriptor, _read_version(view), "after")


def _read_version(view: memoryview) -> int:
    magic, version = _HEADER.unpack_from(view, 0)
    if magic != _MAGIC:
        raise weights.torn("the file is no weight file")
    return int(version)


def _withdraw(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            file.write(_HEADER.pack(_MAGIC, weights.GONE_VERSION))
    except FileNotFoundError:
        return
    path.unlink(missing_ok=True)
