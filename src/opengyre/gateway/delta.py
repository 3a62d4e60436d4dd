"""A request's body as what it adds to another one: small, exact, quick.

Must not know: what the bytes mean. Invariants: `restore_body(delta, parent)` gives back the exact
bytes or says that it cannot; time and memory are bounded whatever the two bodies are.
"""

import zlib

import zstandard

from opengyre.gateway.body import MAX_BODY_BYTES
from opengyre.seams.errors import BoundaryError

_FRAMED = b"\x01"
_DEFLATED = b"\x02"
_SHORT_BYTES = 1024
_HEAD_BYTES = 5
_RUN_BYTES = 12
_MAX_RUNS = 4096
_MAX_SEARCHED_BYTES = 2**26
_MIN_RUN_BYTES = 256
_SAMPLE_BYTES = 64
_WINDOW_BYTES = 2**16
_CHUNK_BYTES = 2**18
_MAX_DICTIONARY_BYTES = 8 * 2**20
_LARGE_BITS = 20
_MAX_WINDOW_BITS = 27
_Run = tuple[int, int, int]


def body_delta(body: bytes, parent: bytes) -> bytes:
    """`body` as runs that it has in common with `parent` and the rest: what a harness moves or
    changes costs its own bytes only.

    A format byte, u32 number of runs, of each (start here, start in the parent, bytes) as u32,
    then the rest: deflated if it is short, else in zstandard with what is left of the parent as
    its dictionary. About 2 ms per MB, 5 for what has no run.
    """
    runs = _runs(body, parent)
    rest = _outside(body, [(start, length) for start, _, length in runs])
    is_short = len(rest) <= _SHORT_BYTES
    head = [_DEFLATED if is_short else _FRAMED, len(runs).to_bytes(4, "little")]
    head += [number.to_bytes(4, "little") for run in runs for number in run]
    packed = zlib.compress(rest, 1) if is_short else _compress(rest, _left(parent, runs))
    return b"".join([*head, packed])


def restore_body(delta: bytes, parent: bytes) -> bytes:
    """The body whose `body_delta` against `parent` is `delta`. Raises BoundaryError if that
    cannot be: another format, another parent, damage."""
    if delta[:1] not in (_DEFLATED, _FRAMED) or len(delta) < _HEAD_BYTES:
        raise _damaged(f"format {delta[:1].hex()} is not known")
    end = _HEAD_BYTES + _RUN_BYTES * int.from_bytes(delta[1:_HEAD_BYTES], "little")
    if end > len(delta):
        raise _damaged("runs are missing")
    numbers = [int.from_bytes(delta[at : at + 4], "little") for at in range(_HEAD_BYTES, end, 4)]
    runs = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    _check_runs(runs, len(parent))
    is_short = delta[:1] == _DEFLATED
    rest = _inflate(delta[end:]) if is_short else _decompress(delta[end:], _left(parent, runs))
    parts, at, used = [], 0, 0
    for start, there, length in runs:
        parts += [rest[used : used + start - at], parent[there : there + length]]
        used += start - at
        at = start + length
    if used > len(rest):
        raise _damaged("bytes are missing")
    return b"".join([*parts, rest[used:]])


def _runs(body: bytes, parent: bytes) -> list[_Run]:
    """Common runs in the order of both: the common prefix, long ones, the common suffix."""
    prefix = _num_same(body, 0, parent, 0)
    room = min(len(body), len(parent)) - prefix
    suffix = _common_suffix(body[len(body) - room :], parent[len(parent) - room :])
    one, other = body[: len(body) - suffix], parent[: len(parent) - suffix]
    runs, at, there, num_searched = [(0, 0, prefix)], prefix, prefix, 0
    while len(runs) < _MAX_RUNS and num_searched < _MAX_SEARCHED_BYTES:
        found, num_bytes = _next_run(one, at, other, there)
        if found is None:
            break
        runs.append(found)
        at, there = found[0] + found[2], found[1] + found[2]
        num_searched += num_bytes
    runs.append((len(one), len(other), suffix))
    return [run for run in runs if run[2]]


def _next_run(body: bytes, at: int, parent: bytes, there: int) -> tuple[_Run | None, int]:
    """The next long run after `at` and `there`, from samples of `body` at growing distances, each
    looked for at growing distances; and how many bytes were searched in vain."""
    step = num_searched = 0
    while at + step + _SAMPLE_BYTES <= len(body):
        sample = body[at + step : at + step + _SAMPLE_BYTES]
        window = _WINDOW_BYTES + 16 * step
        found = parent.find(sample, there, there + window)
        if found >= 0:
            back = min(step, found - there)
            before = body[at + step - back : at + step], parent[found - back : found]
            num_before = _common_suffix(*before)
            start, start_there = at + step - num_before, found - num_before
            length = _num_same(body, start, parent, start_there)
            if length >= _MIN_RUN_BYTES:
                return (start, start_there, length), num_searched
        num_searched += min(window, len(parent) - there)
        step = max(_SAMPLE_BYTES, 2 * step)
    return None, num_searched


def _num_same(one: bytes, start: int, other: bytes, other_start: int) -> int:
    """Bytes from the two starts on that are the same."""
    room, at, size = min(len(one) - start, len(other) - other_start), 0, _SAMPLE_BYTES
    while at < room:
        size = min(2 * size, _CHUNK_BYTES, room - at)
        left = one[start + at : start + at + size]
        right = other[other_start + at : other_start + at + size]
        if left != right:
            return at + _common_prefix(left, right)
        at += size
    return at


def _left(parent: bytes, runs: list[_Run]) -> bytes:
    left = _outside(parent, [(there, length) for _, there, length in runs])
    return left[:_MAX_DICTIONARY_BYTES]


def _outside(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    """What of `data` is in none of the ordered (start, length)."""
    parts, at = [], 0
    for start, length in spans:
        parts.append(data[at:start])
        at = start + length
    return b"".join([*parts, data[at:]])


def _check_runs(runs: list[_Run], num_parent: int) -> None:
    at = at_parent = 0
    for start, there, length in runs:
        if start < at or there < at_parent or there + length > num_parent:
            raise _damaged("it belongs to another parent")
        at, at_parent = start + length, there + length


def _inflate(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        rest = unpacker.decompress(data, _SHORT_BYTES)
    except zlib.error as error:
        raise _damaged(str(error)) from error
    if not unpacker.eof:
        raise _damaged("its rest does not end")
    return rest


def _compress(rest: bytes, known: bytes) -> bytes:
    num_bits = (len(rest) + len(known)).bit_length()
    is_large = num_bits > _LARGE_BITS
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1 if is_large else 3,
        window_log=min(_MAX_WINDOW_BITS, max(10, num_bits)),
        hash_log=min(21, max(14, num_bits - 3)),
        chain_log=14 if is_large else 16,
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(
        dict_data=_dictionary(known), compression_params=parameters
    ).compress(rest)


def _decompress(frame: bytes, known: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(frame) > MAX_BODY_BYTES:
            raise _damaged("it is too large")
        return zstandard.ZstdDecompressor(
            dict_data=_dictionary(known), max_window_size=1 << _MAX_WINDOW_BITS
        ).decompress(frame)
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error


def _dictionary(known: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _damaged(reason: str) -> BoundaryError:
    return BoundaryError("tokens", f"a request body cannot be restored: {reason}", retryable=False)


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
