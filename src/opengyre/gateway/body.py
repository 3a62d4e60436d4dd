"""Request bodies as bytes: strict decoding, one canonical form.

Must not know: what the JSON means. Invariant: NaN, infinities, invalid UTF-8 and nesting bombs
are refused.
"""

import hashlib
import re
from typing import Any

import msgspec

from opengyre.gateway.request import Refusal

MAX_BODY_BYTES = 32 * 2**20
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


def mended(json: bytes) -> bytes:
    """Every escaped half of a surrogate pair as U+FFFD, as a JavaScript program would write it."""
    return _PAIR_OR_LONE.sub(lambda m: rb"\ufffd" if m.group(3) else m.group(0), json)


def _decode_mended(body: bytes, cause: Exception) -> Any:
    try:
        if (whole := mended(body)) != body:
            return msgspec.json.decode(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = error
    reason = "nested too deeply" if isinstance(cause, RecursionError) else str(cause)
    raise Refusal(f"the body is not valid JSON: {reason}") from cause


def canonical(value: Any) -> bytes:
    """JSON that is the same whatever the order of its keys."""
    return _sorted.encode(value)


def digest(value: Any) -> bytes:
    """16 bytes of a JSON value, the same whatever the order of its keys."""
    return hashlib.blake2b(canonical(value), digest_size=16).digest()
