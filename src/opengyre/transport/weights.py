"""Laying tensors out as one run of bytes, and checking them: shared by every weight plane.

Owns: offsets, dtype names, checksums, and the refusals of a pull. Must not know how the bytes
travel. Invariants: tensors are 64-byte aligned, in the mapping's order; a tensor is accepted
only if its checksum equals the one computed when it was exposed.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Descriptor, PlaneKind, TensorSpec

BOUNDARY = "weights"
GONE_VERSION = -1
ALIGN_BYTES = 64
# Weights are never 16-bit integers, so uint16 always means the bits of a bfloat16.
_NAME_BY_DTYPE = {"uint16": "bfloat16"}

Array = np.ndarray[Any, Any]


def dtype_name(array: Array) -> str:
    """The name a descriptor uses for the dtype of `array`."""
    name: str = array.dtype.name
    return _NAME_BY_DTYPE.get(name, name)


def body_bytes(tensors: Mapping[str, Array]) -> int:
    """Bytes that `lay_out` fills for these tensors."""
    return sum(_aligned(array.nbytes) for array in tensors.values())


def lay_out(tensors: Mapping[str, Array], body: memoryview) -> list[TensorSpec]:
    """Copy every tensor into `body` and describe it; checksums are of the copy."""
    specs = []
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        target = np.frombuffer(body[offset:end], dtype=array.dtype).reshape(array.shape)
        np.copyto(target, array)
        specs.append(
            TensorSpec(
                name=name,
                shape=list(array.shape),
                dtype=dtype_name(array),
                offset_bytes=offset,
                num_bytes=array.nbytes,
                checksum=checksum_of(body[offset:end]),
            )
        )
        del target
        offset += _aligned(array.nbytes)
    return specs


def superseded(versions: Sequence[int], *, num_newest: int, pinned: Collection[int]) -> list[int]:
    """Which of a plane's exposures are to be withdrawn: places in `versions`, oldest first. The
    newest ones stay, and of each pinned version the newest."""
    last_place = {version: place for place, version in enumerate(versions)}
    pinned_places = {last_place[version] for version in pinned if version in last_place}
    return [place for place in range(len(versions) - num_newest) if place not in pinned_places]


def wanted(
    descriptor: Descriptor, into: Mapping[str, Array], *, plane: PlaneKind
) -> list[TensorSpec]:
    """What a pull copies, in the order of its bytes. Refuses another plane's descriptor, a name
    that is not exposed, another shape or dtype, before a byte is written."""
    if descriptor.plane != plane:
        raise mismatch(f"exposed by {descriptor.plane!r}, asked for by {plane!r}")
    exposed = {spec.name: spec for spec in descriptor.tensors}
    if absent := sorted(into.keys() - exposed.keys()):
        raise mismatch(f"tensor {absent[0]!r} is not exposed")
    for name, array in into.items():
        spec = exposed[name]
        is_same = spec.shape == list(array.shape) and spec.dtype == dtype_name(array)
        if not is_same:
            ours = f"{dtype_name(array)}{list(array.shape)}"
            raise mismatch(f"tensor {name!r} is {spec.dtype}{spec.shape}, expected {ours}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise mismatch(f"tensor {name!r} cannot be written in place")
    return [spec for spec in descriptor.tensors if spec.name in into]


def bytes_of(array: Array) -> memoryview:
    """The writable bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def checksum_of(body: memoryview) -> int:
    """xxh3_64: three times as fast as crc32 here, about as fast as copying."""
    return xxhash.xxh3_64_intdigest(body)


def check_tensor(spec: TensorSpec, copied: memoryview) -> None:
    """Raise unless the bytes that arrived are the bytes that were exposed."""
    if checksum_of(copied) != spec.checksum:
        raise torn(f"checksum of {spec.name!r} differs")


def check_version(descriptor: Descriptor, seen: int, when: str) -> None:
    """Raise unless the exposed tensors still were of the descriptor's version `when`."""
    if seen == GONE_VERSION:
        raise gone(f"version {descriptor.version} was withdrawn {when} the copy")
    if seen != descriptor.version:
        raise torn(f"version is {seen}, not {descriptor.version}, {when} the copy")


def mismatch(words: str) -> BoundaryError:
    """What is exposed does not fit what the reader has; trying again cannot help."""
    return BoundaryError(BOUNDARY, words, retryable=False)


def no_room(words: str) -> BoundaryError:
    """The exposer cannot place the tensors (memory, port)."""
    return BoundaryError(BOUNDARY, words, retryable=False)


def torn(words: str) -> BoundaryError:
    """The bytes are not those that were exposed."""
    return BoundaryError(BOUNDARY, f"torn read: {words}", retryable=True)


def gone(words: str) -> BoundaryError:
    """The exposer, or what it exposed, is not there any more."""
    return BoundaryError(BOUNDARY, f"gone: {words}", retryable=True)


def is_refusal(error: BoundaryError) -> bool:
    """Did a pull fail, here or at the other end of a call."""
    return error.boundary == BOUNDARY or error.reason.startswith(f"{BOUNDARY}: ")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
