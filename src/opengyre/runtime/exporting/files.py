"""Exported rows as JSON lines or as one Parquet file.

Must not know: what a row means. Invariants: memory is bounded by a million token ids; a file
that is not whole never stands under its name.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import msgspec

from opengyre.runtime.exporting.row import SCHEMA, TurnRow
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.store.whole_file import whole_file

MAX_GROUP_TOKENS = 1_000_000
MAX_GROUP_ROWS = 1_000
_json = msgspec.json.Encoder()


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


def write_rows(rows: Iterable[TurnRow], format_: ExportFormat, out: Path | None) -> None:
    """`out` None: JSON lines to stdout.

    Raises ConfigError if `out` cannot be written or Parquet has no file or no pyarrow,
    BoundaryError when the disk refuses.
    """
    if format_ is ExportFormat.JSONL and out is None:
        _write_lines(rows, sys.stdout.buffer)
        return
    if out is None:
        raise ConfigError("--format parquet needs --out FILE")
    if format_ is ExportFormat.PARQUET:
        _require_pyarrow()
    with _whole_file(out) as file:
        if format_ is ExportFormat.JSONL:
            _write_lines(rows, file)
        else:
            _write_parquet(rows, file)


def _write_lines(rows: Iterable[TurnRow], file: IO[bytes]) -> None:
    for row in rows:
        file.write(_json.encode(row) + b"\n")
    file.flush()


@contextlib.contextmanager
def _whole_file(out: Path) -> Iterator[IO[bytes]]:
    try:
        with whole_file(out) as file:
            yield file
    except OSError as error:
        raise BoundaryError("export", f"{out}: {error.strerror}", retryable=False) from error


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--format parquet needs pyarrow: pip install 'opengyre[parquet]'"
        ) from error


def _write_parquet(rows: Iterable[TurnRow], file: IO[bytes]) -> None:
    import pyarrow.parquet as parquet

    schema = parquet_schema()
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(rows):
            writer.write_table(_table(group, schema))


def _table(rows: list[TurnRow], schema: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist([msgspec.to_builtins(row) for row in rows], schema=schema)


def _groups(rows: Iterable[TurnRow]) -> Iterator[list[TurnRow]]:
    """Rows of about a million ids at a time."""
    group: list[TurnRow] = []
    num_tokens = 0
    for row in rows:
        group.append(row)
        num_tokens += len(row.prompt_ids or ()) + len(row.completion_ids)
        if num_tokens >= MAX_GROUP_TOKENS or len(group) >= MAX_GROUP_ROWS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group


def parquet_schema() -> Any:
    """The Arrow types of a row's columns; the file's metadata tells `opengyre.schema`."""
    import pyarrow as pa

    text, number, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    call = pa.struct([("id", text), ("name", text), ("arguments", text)])
    message = pa.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning", text),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", text),
        ]
    )
    ends = [("start", number), ("end", number)]
    span = pa.struct([*ends, ("policy_version", number), ("engine", text)])
    special = {
        "messages": pa.list_(message),
        "answer": message,
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "spans": pa.list_(span),
        "trained": pa.list_(pa.struct(ends)),
    }
    plain = {str: text, int: number, float: real, bool: flag}
    columns = [
        (column.name, special.get(column.name) or plain[_plain_type(column.type)])
        for column in msgspec.structs.fields(TurnRow)
    ]
    return pa.schema(columns, metadata={"opengyre.schema": str(SCHEMA)})


def _plain_type(kind: Any) -> type:
    """`int` of `int | None`."""
    options = [one for one in getattr(kind, "__args__", (kind,)) if one is not type(None)]
    found: type = options[0]
    return found
