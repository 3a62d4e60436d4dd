"""Exit codes, and the one place where an error becomes a line on stderr.

Owns: 0 done, 1 the run failed, 2 the user's input, 3 interrupted. Must not know: what a run is.
"""

from enum import IntEnum

import typer
from typer.core import TyperGroup

from opengyre.seams.errors import BoundaryError, ConfigError


class ExitCode(IntEnum):
    """What every `gyre` command ends with."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 3


class GyreGroup(TyperGroup):
    """A group of commands whose expected errors end in one line, not in a traceback.

    An InvariantError or any other bug of ours passes through and shows where it happened.
    """

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # click is vendored
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            code, text = ExitCode.BAD_INPUT, str(error)
        except BoundaryError as error:
            code, text = ExitCode.FAILED, str(error)
        except KeyboardInterrupt:
            code, text = ExitCode.INTERRUPTED, "interrupted"
        for line in text.splitlines():
            typer.echo(f"gyre: {line}", err=True)
        raise typer.Exit(code)
