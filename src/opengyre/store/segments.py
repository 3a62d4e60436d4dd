"""Token bytes of the run: `tokens/NNNN.seg`, append-only, written by the gateways alone.

Owns: the record format, rotation, group sync, checked reading. Must not know: the database.
Record: u32 payload bytes, u32 crc32 of the payload, payload = u32 header bytes, header JSON (the
TurnRecord without `ref`), new prompt ids int32, completion ids int32, logprobs float32, request
delta; all little endian. Invariants: a file has one writer, whose files have growing numbers (not
always neighbours: writers share the folder), and is never written to after the next one was begun;
a torn tail hides only records that were never told; after a failed sync every later one fails.
"""

import asyncio
import mmap
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord

MAGIC = b"GYRESEG1"
ROTATE_BYTES = 64 * 2**20
MAX_RECORD_BYTES = 1 << 30
SYNC_TIMEOUT_S = 30.0
_HEAD_BYTES = 8
_ID_BYTES = 4
_HEADER_BEGINS = b'{"turn":"'

_encoder = msgspec.json.Encoder()
_no_ref = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are no record. Those at a file's end are what a writer that was killed, or that
    still writes, left unfinished: such a record was never told to anyone."""

    segment: int
    offset_bytes: int
    num_bytes: int
    is_at_end: bool

    def __str__(self) -> str:
        kind = "an unfinished" if self.is_at_end else "a damaged"
        where = f"segment {self.segment} at {self.offset_bytes}"
        return f"{where}: {kind} record of {self.num_bytes} bytes"


def _ignore(damage: Damage) -> None:
    """A record that is not whole hides nothing but itself."""


class SegmentWriter:
    """Appends token records; begins a new file at each opening and at `rotate_bytes`."""

    def __init__(self, folder: Path, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._folder = folder
        self._rotate_bytes = rotate_bytes
        self._segment = max(segment_numbers(folder), default=-1)
        self._fd = -1
        self._offset_bytes = 0
        self._unsynced: list[int] = []
        self._num_written = 0
        self._num_synced = 0
        self._syncing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._failure: BoundaryError | None = None
        self._begin_file()

    def append(self, record: TokenRecord) -> SegmentRef:
        """Write `record` (its header's `ref` is ignored) and say where; `sync` makes it durable.

        Raises BoundaryError("tokens") on a full disk; the file is as before then.
        """
        if self._offset_bytes > self._rotate_bytes:
            self._begin_file()
        payload = _pack(record)
        crc = zlib.crc32(payload)
        head = len(payload).to_bytes(4, "little") + crc.to_bytes(4, "little")
        ref = SegmentRef(segment=self._segment, offset_bytes=self._offset_bytes, crc32=crc)
        self._write(head + payload)
        self._num_written += 1
        return ref

    async def sync(self) -> None:
        """Return when everything appended so far is on disk; concurrent calls share one sync."""
        wanted = self._num_written
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S), self._syncing:
                if self._num_synced >= wanted:
                    return
                if self._failure is not None:
                    raise self._failure
                covers, old = self._num_written, list(self._unsynced)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, _sync_files, [*old, self._fd])
                self._num_synced = covers
                self._unsynced = self._unsynced[len(old) :]
                for fd in old:
                    os.close(fd)
        except (OSError, TimeoutError) as error:
            self._failure = _failed(f"sync: {error or 'time-out'}")
            raise self._failure from error

    async def close(self) -> None:
        """Sync and close."""
        try:
            await self.sync()
        finally:
            self._thread.shutdown(wait=False)
        os.close(self._fd)
        self._fd = -1

    def _begin_file(self) -> None:
        if self._fd >= 0:
            self._unsynced.append(self._fd)
        try:
            self._segment, self._fd = _create_next(self._folder, self._segment + 1)
            self._offset_bytes = 0
            self._write(MAGIC)
            sync_folder(self._folder)
        except OSError as error:
            raise _failed(f"{error.filename or self._folder}: {error.strerror}") from error

    def _write(self, data: bytes) -> None:
        try:
            done = os.write(self._fd, data)
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            os.ftruncate(self._fd, self._offset_bytes)
            os.lseek(self._fd, self._offset_bytes, os.SEEK_SET)
            raise _failed(f"segment {self._segment}: {error.strerror}") from error
        self._offset_bytes += len(data)


class SegmentReader:
    """Reads records back, by reference or all in order; safe beside a live writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, ref: SegmentRef) -> TokenRecord:
        """The record at `ref`. Raises BoundaryError if it is not there or its crc differs."""
        try:
            fd = os.open(_path(self._folder, ref.segment), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _failed(f"segment {ref.segment}: {error.strerror}") from error
        try:
            found = _payload_at(fd, ref.segment, ref.offset_bytes)
        finally:
            os.close(fd)
        where = f"segment {ref.segment} at {ref.offset_bytes}"
        if found is None:
            raise _failed(f"{where}: torn or damaged record")
        if found[1].crc32 != ref.crc32:
            raise _failed(f"{where}: another record than the one that was told")
        return _unpack(*found)

    def scan(
        self, segment: int, *, on_damage: Callable[[Damage], None] = _ignore
    ) -> Iterator[TokenRecord]:
        """Every whole record of one file in order; what is none is told to `on_damage`.

        Raises ConfigError if the file is of another format.
        """
        for payload, ref in self._payloads(segment, on_damage):
            yield _unpack(payload, ref)

    def scan_headers(
        self, segment: int, *, on_damage: Callable[[Damage], None] = _ignore
    ) -> Iterator[TurnRecord]:
        """As `scan`, the headers alone: more than ten times faster."""
        for payload, ref in self._payloads(segment, on_damage):
            yield _header(payload, ref)

    def _payloads(
        self, segment: int, on_damage: Callable[[Damage], None]
    ) -> Iterator[tuple[bytes, SegmentRef]]:
        path = _path(self._folder, segment)
        with path.open("rb", buffering=0) as file:
            magic = os.pread(file.fileno(), len(MAGIC), 0)
            if magic != MAGIC[: len(magic)]:
                raise ConfigError(f"{path}: not a token segment of this gyre")
            at, size = len(MAGIC), os.fstat(file.fileno()).st_size
            while at < size:
                if (found := _payload_at(file.fileno(), segment, at)) is not None:
                    yield found
                    at += _HEAD_BYTES + len(found[0])
                    continue
                following = _next_record(file.fileno(), segment, at + 1, size)
                on_damage(
                    Damage(
                        segment=segment,
                        offset_bytes=at,
                        num_bytes=following - at,
                        is_at_end=following == size,
                    )
                )
                at = following


def segment_numbers(folder: Path) -> list[int]:
    return sorted(int(one.stem) for one in folder.glob("*.seg") if one.stem.isdigit())


def make_durable(folder: Path, segments: Iterable[int]) -> None:
    """Sync what a writer that died may have left unsynced. Blocks; raises BoundaryError."""
    for segment in segments:
        try:
            fd = os.open(_path(folder, segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise _failed(f"segment {segment}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make created and renamed names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:04d}.seg"


def _create_next(folder: Path, segment: int) -> tuple[int, int]:
    """The first number from `segment` on that no other writer took, and its open file."""
    while True:
        try:
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return segment, os.open(_path(folder, segment), how, 0o644)
        except FileExistsError:
            segment += 1


def _sync_files(fds: list[int]) -> None:
    for fd in fds:
        os.fdatasync(fd)


def _pack(record: TokenRecord) -> bytes:
    fields = msgspec.to_builtins(record.header)
    del fields["ref"]
    header = _encoder.encode(fields)
    turn = record.header
    counts = (len(record.new_prompt_ids), len(record.completion_ids), len(record.logprobs))
    told = (turn.num_new_prompt_tokens, turn.num_completion_tokens, turn.num_completion_tokens)
    if counts != told:
        raise _failed(f"{turn.turn}: header tells {told} tokens, the record has {counts}")
    numbers = (
        _to_bytes(array("i", record.new_prompt_ids)),
        _to_bytes(array("i", record.completion_ids)),
        _to_bytes(array("f", record.logprobs)),
    )
    head = len(header).to_bytes(4, "little")
    payload = b"".join((head, header, *numbers, record.request_delta))
    if len(payload) > MAX_RECORD_BYTES:
        raise _failed(f"{turn.turn}: a record of {len(payload)} bytes is too large")
    return payload


def _payload_at(fd: int, segment: int, offset_bytes: int) -> tuple[bytes, SegmentRef] | None:
    """The payload of the record at `offset_bytes`; None if torn or damaged."""
    head = os.pread(fd, _HEAD_BYTES, offset_bytes)
    if len(head) < _HEAD_BYTES:
        return None
    size, crc = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
    if not 0 < size <= MAX_RECORD_BYTES:
        return None
    payload = os.pread(fd, size, offset_bytes + _HEAD_BYTES)
    if len(payload) < size or zlib.crc32(payload) != crc:
        return None
    return payload, SegmentRef(segment=segment, offset_bytes=offset_bytes, crc32=crc)


def _next_record(fd: int, segment: int, start: int, size: int) -> int:
    """Where the next whole record begins; `size` if none does."""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as data:
        found = data.find(_HEADER_BEGINS, start + _HEAD_BYTES + 4)
        while found >= 0:
            at = found - _HEAD_BYTES - 4
            if _payload_at(fd, segment, at) is not None:
                return at
            found = data.find(_HEADER_BEGINS, found + 1)
    return size


def _header(payload: bytes, ref: SegmentRef) -> TurnRecord:
    fields = msgspec.json.decode(payload[4 : 4 + int.from_bytes(payload[:4], "little")])
    header = msgspec.convert({**fields, "ref": _no_ref}, TurnRecord)
    return msgspec.structs.replace(header, ref=ref)


def _unpack(payload: bytes, ref: SegmentRef) -> TokenRecord:
    header = _header(payload, ref)
    ids: array[int] = array("i")
    logprobs: array[float] = array("f")
    num_prompt, num_sampled = header.num_new_prompt_tokens, header.num_completion_tokens
    begin = 4 + int.from_bytes(payload[:4], "little")
    middle = begin + (num_prompt + num_sampled) * _ID_BYTES
    end = middle + num_sampled * _ID_BYTES
    ids.frombytes(payload[begin:middle])
    logprobs.frombytes(payload[middle:end])
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    return TokenRecord(
        header=header,
        new_prompt_ids=ids[:num_prompt].tolist(),
        completion_ids=ids[num_prompt:].tolist(),
        logprobs=logprobs.tolist(),
        request_delta=payload[end:],
    )


def _to_bytes(numbers: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _failed(reason: str) -> BoundaryError:
    return BoundaryError("tokens", reason, retryable=False)
