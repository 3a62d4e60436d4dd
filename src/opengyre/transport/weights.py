"""Laying tensors out as one run of bytes, and checking them: shared by every weight plane.

Owns: offsets, dtype names, checksums, and the refusals of a pull. Must not know how the bytes
travel. Invariants: tensors are 64-byte aligned, in the mapping's order; a tensor is accepted
only if its crc32 equals the one computed when it was exposed.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Descriptor, TensorSpec

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
                crc32=zlib.crc32(body[offset:end]),
            )
        )
        del target
        offset += _aligned(array.nbytes)
    return specs


def check_targets(descriptor: Descriptor, into: Mapping[str, Array]) -> None:
    """Refuse a pull of a name that is not exposed, or in another shape or dtype, before a byte is
    written."""
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


def bytes_of(array: Array) -> memoryview:
    """The writable bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def check_tensor(spec: TensorSpec, copied: memoryview) -> None:
    """Raise unless the bytes that arrived are the bytes that were exposed."""
    if zlib.crc32(copied) != spec.crc32:
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
