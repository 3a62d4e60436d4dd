"""`gyre run show | report | verify | inspect | replay | export RUN`: a folder, read after the fact.

Owns: their output. Must not know: how a run is driven. Invariant: reads only; `report` writes the
picture and nothing else.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from opengyre.cli.errors import ExitCode, GyreGroup
from opengyre.cli.run_export import export
from opengyre.cli.run_inspect import inspect

run_app = typer.Typer(
    cls=GyreGroup,
    no_args_is_help=True,
    help="Look at a run: what happened, whether its promises were kept, and its picture.",
)
run_app.command(name="export")(export)
run_app.command(name="inspect")(inspect)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@run_app.command()
def show(run: RunPath, as_json: AsJson = False) -> None:
    """Print the summary, one line for each step, handoffs, and the memory of each role."""
    from opengyre.views.handoffs import handoff_cells
    from opengyre.views.memory import role_memory_cells, switch_cells
    from opengyre.views.summary import summarise
    from opengyre.views.tables import step_cells, table, work_cells
    from opengyre.views.words import final_lines

    folder, state = _fold(run)
    summary = summarise(state)
    if as_json:
        told = {
            "steps": step_cells(state),
            "cells": work_cells(state),
            "handed_over": handoff_cells(state),
            "memory": role_memory_cells(state),
            "switches": switch_cells(state),
        }
        return _print_json({**summary, **told})
    report = str(folder.report_png) if folder.report_png.exists() else ""
    _print_lines(final_lines(summary, folder=str(run), report=report))
    tables = (step_cells, work_cells, handoff_cells, role_memory_cells, switch_cells)
    for rows in (cells(state) for cells in tables):
        _print_lines(["", *table(rows)] if rows else [])


@run_app.command()
def report(
    run: RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where the PNG goes (RUN/report.png)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the run as one picture: cell lanes, waterlevel, ready groups, rewards."""
    from opengyre.views.report import draw_report

    folder, state = _fold(run)
    path = folder.report_png if output is None else output
    draw_report(state, path)
    if as_json:
        return _print_json({"report": str(path)})
    typer.echo(path)


@run_app.command()
def verify(run: RunPath, as_json: AsJson = False) -> None:
    """Check promises P1-P6, P8, P10-P12, P16 from journal and token segments; exit 1 if broken."""
    from dataclasses import asdict

    from opengyre.store.run_folder import open_run_folder
    from opengyre.views.verify import verify_run

    results = verify_run(open_run_folder(run))
    if as_json:
        _print_json([{**asdict(one), "is_kept": one.is_kept} for one in results])
    else:
        for one in results:
            typer.echo(one.line())
            _print_lines([f"      {text}" for text in (*one.problems, *one.notes)])
    if not all(one.is_kept for one in results):
        raise typer.Exit(ExitCode.FAILED)


@run_app.command()
def replay(run: RunPath, as_json: AsJson = False) -> None:
    """Feed the run's facts to a fresh scheduler; exit 1 at the first plan that differs."""
    from dataclasses import asdict

    import msgspec

    from opengyre.control.config import SchedulerConfig
    from opengyre.control.scheduler import Scheduler
    from opengyre.store.journal import read_journal
    from opengyre.store.run_folder import open_run_folder
    from opengyre.views.replay import replay as replay_rows

    folder = open_run_folder(run)
    result = replay_rows(
        read_journal(folder.db),
        lambda fields: Scheduler(msgspec.convert(fields, SchedulerConfig)),
    )
    if as_json:
        _print_json({**asdict(result), "is_same": result.is_same})
    else:
        same = "the same" if result.is_same else "different"
        typer.echo(f"{result.num_facts} facts, {result.num_plans} plans, {same}")
        _print_lines([result.difference] if result.difference else [])
    if not result.is_same:
        raise typer.Exit(ExitCode.FAILED)


def _fold(run: Path) -> Any:
    from opengyre.store.journal import read_journal
    from opengyre.store.run_folder import open_run_folder
    from opengyre.views.fold import fold

    folder = open_run_folder(run)
    return folder, fold(read_journal(folder.db))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
