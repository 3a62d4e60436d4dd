"""Request bodies as bytes: strict decoding, one canonical digest, deltas against a parent's body.

Must not know: what the JSON means. Invariants: NaN, infinities, invalid UTF-8 and nesting bombs
are refused; `restore_body(delta, parent)` gives back the exact bytes.
"""

import hashlib
import re
import zlib
from typing import Any

import msgspec

from opengyre.gateway.request import Refusal

MAX_BODY_BYTES = 32 * 2**20
_ZLIB_LEVEL = 3
_sorted = msgspec.json.Encoder(order="sorted")
_PAIR_OR_LONE = re.compile(
    rb"(\\\\)|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Half of a surrogate pair becomes U+FFFD: harnesses cut strings
    in the middle of one, and it is no reason to lose an execution.

    Raises Refusal for anything else that is not strict JSON.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        value = _decode_mended(body, error)
    if not isinstance(value, dict):
        raise Refusal("the body must be a JSON object")
    return value


def _decode_mended(body: bytes, cause: Exception) -> Any:
    mended = _PAIR_OR_LONE.sub(lambda m: rb"\ufffd" if m.group(3) else m.group(0), body)
    try:
        if mended != body:
            return msgspec.json.decode(mended)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = error
    reason = "nested too deeply" if isinstance(cause, RecursionError) else str(cause)
    raise Refusal(f"the body is not valid JSON: {reason}") from cause


def digest(value: Any) -> bytes:
    """16 bytes of a JSON value, the same whatever the order of its keys."""
    return hashlib.blake2b(_sorted.encode(value), digest_size=16).digest()


def body_delta(body: bytes, parent: bytes) -> bytes:
    """`body` as (length of the common prefix, of the common suffix, deflated middle)."""
    prefix = _common_prefix(body, parent)
    room = min(len(body), len(parent)) - prefix
    suffix = _common_suffix(body[len(body) - room :], parent[len(parent) - room :])
    middle = zlib.compress(body[prefix : len(body) - suffix], _ZLIB_LEVEL)
    return prefix.to_bytes(4, "little") + suffix.to_bytes(4, "little") + middle


def restore_body(delta: bytes, parent: bytes) -> bytes:
    """The body whose `body_delta` against `parent` is `delta`."""
    prefix = int.from_bytes(delta[:4], "little")
    suffix = int.from_bytes(delta[4:8], "little")
    middle = zlib.decompress(delta[8:])
    return parent[:prefix] + middle + parent[len(parent) - suffix :]


def _common_prefix(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(one: bytes, other: bytes) -> int:
    """Of two of the same length."""
    low, high = 0, len(one)
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
