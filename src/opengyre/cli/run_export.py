"""`gyre run export RUN`: recorded turns as JSON lines or Parquet.

Owns: its options and output. Must not know: how a row is restored. Invariant: reads only the run,
writes only the file it was given.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opengyre.cli.errors import ExitCode

if TYPE_CHECKING:
    from opengyre.runtime.exporting.recorded import ExportTotals

MAX_TOLD = 20


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run's folder, or one of gyre gateway")
    ],
    format_name: Annotated[
        str, typer.Option("--format", metavar="jsonl|parquet", help="what to write")
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="where (jsonl: standard output)")
    ] = None,
    execution: Annotated[
        str, typer.Option("--execution", metavar="E", help="this one only, like e000123")
    ] = "",
    model: Annotated[
        Path | None, typer.Option("--model", help="where the model's tokenizer is now")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="tell what was written as JSON; needs --out")
    ] = False,
) -> None:
    """Write one row for each recorded attempt of a turn; exit 1 if something was damaged."""
    from opengyre.runtime.exporting.files import ExportFormat, write_rows
    from opengyre.runtime.exporting.recorded import open_recorded
    from opengyre.runtime.exporting.rows import rows_of
    from opengyre.seams.errors import ConfigError

    known = [one.value for one in ExportFormat]
    if format_name not in known:
        raise ConfigError(f"--format {format_name}: expected one of {', '.join(known)}")
    if as_json and out is None:
        raise ConfigError("--json tells about a file; say --out FILE")
    recorded = open_recorded(run, model=model)
    write_rows(rows_of(recorded, execution=execution), ExportFormat(format_name), out)
    _tell(recorded.totals, out, as_json=as_json)
    if recorded.totals.problems:
        raise typer.Exit(ExitCode.FAILED)


def _tell(totals: "ExportTotals", out: Path | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"out": str(out), **asdict(totals)}))
        return
    for problem in totals.problems[:MAX_TOLD]:
        typer.echo(f"gyre: {problem}", err=True)
    num_more = len(totals.problems) - MAX_TOLD
    if num_more > 0:
        typer.echo(f"gyre: {num_more} more", err=True)
    what = f"{totals.num_rows} rows of {totals.num_executions} executions"
    typer.echo(f"{what} in {out}" if out else what, err=out is None)
