"""A file of the user's naming, written whole or not at all.

Must not know: what is in it. Invariants: a file that is not whole never stands under its name; what
is no plain file (a device, a pipe) is written to, never replaced; a link stays one.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from opengyre.seams.errors import ConfigError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name `path` once it is complete and on disk. Raises ConfigError if it
    cannot be opened, and OSError later."""
    if path.exists() and not path.is_file():
        with _opened(path, "wb", path) as file:
            yield file
        return
    named, path = path, path.resolve()
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    file = _opened(partial, "xb", named)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _opened(path: Path, mode: str, named: Path) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written: {error.strerror}") from error
