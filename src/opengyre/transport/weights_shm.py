"""The weight plane on one host: a file per exposure, mapped by readers.

Owns: files named after its slot in one folder (normally below /dev/shm). Must not know what the
tensors mean. Invariants: a file appears whole under its final name, and its bytes stand still until
it is withdrawn; it is marked before it is unlinked or written anew, so a reader that still maps it
notices; `close` leaves no file.
"""

import mmap
import os
import re
import secrets
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from opengyre.seams.weights import Descriptor, PlaneKind, TensorSpec
from opengyre.transport import weights
from opengyre.transport.weights import Array

PLANE: PlaneKind = "shm"
_MAGIC = b"GYREW002"
_HEADER = struct.Struct("<8sq")
_HEADER_BYTES = weights.ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class _Exposure:
    version: int
    path: Path
    mapped: mmap.mmap


class SharedMemoryPlane:
    """`slot` names the files of this exposer; its first exposure removes what a killed one of the
    same slot left, so that two planes of one slot must not live at once. The `num_newest` newest
    exposures stay readable beside the pinned ones.
    """

    def __init__(self, folder: Path, *, slot: str, num_newest: int = 2) -> None:
        self._folder = folder
        self._slot = slot
        self._num_newest = num_newest
        self._life = secrets.token_hex(4)
        self._num_exposed = 0
        self._kept: list[_Exposure] = []
        self._is_closed = False

    def expose(
        self, tensors: Mapping[str, Array], version: int, *, pinned: Collection[int] = ()
    ) -> Descriptor:
        """Write a new file. Raises BoundaryError if the folder has no room, or this was closed."""
        if self._is_closed:
            raise weights.gone(f"{self._slot} is closed")
        path = self._folder / f"{self._slot}.{self._life}.{self._num_exposed}.weights"
        part = path.with_suffix(".part")
        num_bytes = _HEADER_BYTES + weights.body_bytes(tensors)
        try:
            if self._num_exposed == 0:
                self._withdraw_stale()
            self._num_exposed += 1
            mapped = self._take_spare(pinned, part, num_bytes) or _map(part, num_bytes)
            specs = _fill(mapped, tensors, version)
            part.replace(path)
        except OSError as error:
            raise weights.no_room(f"cannot expose at {path}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        self._kept.append(_Exposure(version, path, mapped))
        return Descriptor(plane=PLANE, address=str(path), version=version, tensors=specs)

    @property
    def exposed_bytes(self) -> int:
        return sum(len(one.mapped) for one in self._kept)

    def pull(self, descriptor: Descriptor, into: Mapping[str, Array]) -> int:
        """Copy in place; after an error `into` is undefined and must not be used."""
        specs = weights.wanted(descriptor, into, plane=PLANE)
        try:
            with Path(descriptor.address).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise weights.gone(f"{descriptor.address}: {error}") from error
        with mapped, memoryview(mapped) as view:
            weights.check_version(descriptor, _read_version(view), "before")
            for spec in specs:
                _copy(spec, view, into[spec.name])
            weights.check_version(descriptor, _read_version(view), "after")
        return descriptor.version

    def close(self) -> None:
        """Withdraw everything; nothing is exposed any more. Idempotent."""
        self._is_closed = True
        while self._kept:
            one = self._kept.pop()
            _withdraw(one.path)
            one.mapped.close()

    def _take_spare(self, pinned: Collection[int], part: Path, num_bytes: int) -> mmap.mmap | None:
        """Withdraw what is superseded. A file of the right size becomes `part`: writing to memory
        that is there and mapped takes a quarter of the time."""
        spare: mmap.mmap | None = None
        versions = [one.version for one in self._kept]
        places = weights.superseded(versions, num_newest=self._num_newest - 1, pinned=pinned)
        for place in reversed(places):
            one = self._kept.pop(place)
            if spare is None and _mark(one.path) == num_bytes:
                one.path.replace(part)
                spare = one.mapped
            else:
                _withdraw(one.path)
                one.mapped.close()
        return spare

    def _withdraw_stale(self) -> None:
        """Files of an earlier process of this slot that was killed."""
        theirs = re.compile(rf"{re.escape(self._slot)}\.[0-9a-f]+\.\d+\.(weights|part)")
        for path in sorted(self._folder.iterdir()):
            if theirs.fullmatch(path.name):
                _withdraw(path)


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    """A new file, all of it in memory."""
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        # A sparse file in a full tmpfs would end the process with SIGBUS on first touch.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _fill(mapped: mmap.mmap, tensors: Mapping[str, Array], version: int) -> list[TensorSpec]:
    with memoryview(mapped) as view:
        with view[_HEADER_BYTES:] as body:
            specs = weights.lay_out(tensors, body)
        _HEADER.pack_into(view, 0, _MAGIC, version)
    return specs


def _copy(spec: TensorSpec, view: memoryview, into: Array) -> None:
    start = _HEADER_BYTES + spec.offset_bytes
    if len(view) < start + spec.num_bytes:
        raise weights.torn("the file is too short")
    with weights.bytes_of(into) as target:
        target[:] = view[start : start + spec.num_bytes]
        weights.check_tensor(spec, target)


def _read_version(view: memoryview) -> int:
    if len(view) < _HEADER.size:
        raise weights.torn("the file is too short")
    magic, version = _HEADER.unpack_from(view, 0)
    if magic != _MAGIC:
        raise weights.torn("the file is no weight file")
    return int(version)


def _withdraw(path: Path) -> None:
    _mark(path)
    path.unlink(missing_ok=True)


def _mark(path: Path) -> int:
    """Who maps the file sees that it is withdrawn. Returns its size, 0 if it is not there."""
    try:
        with path.open("r+b") as file:
            file.write(_HEADER.pack(_MAGIC, weights.GONE_VERSION))
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0
