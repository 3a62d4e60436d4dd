"""`gyre simulate SCENARIO`: a run in simulated time, as a table and as lanes.

Owns: its options and output. Must not know: how a run is simulated, how a figure is computed.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from opengyre.cli.errors import ExitCode
from opengyre.cli.options import command_of
from opengyre.cli.recorded_workload import recorded_workload
from opengyre.seams.errors import BoundaryError, ConfigError

if TYPE_CHECKING:
    from opengyre.config.simulation import PolicyName, SimulationConfig
    from opengyre.simulate.compare import Bench, Ran

POLICIES = ("elastic", "colocate", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What `gyre simulate` is told."""

    scenario: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO", help="a scenario file, or a folder of such files"),
    ]
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="replace one value; may be repeated"),
    ] = None
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, max=10_000, help="seeds 1..n (scenario.num_seeds)"),
    ] = None
    policy: Annotated[str | None, typer.Option("--policy", help="elastic, colocate or async")] = (
        None
    )
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="P,P,..", help="these policies on the same trace"),
    ] = None
    best_static: Annotated[
        bool, typer.Option("--best-static", help="tune the policies that are not elastic, say how")
    ] = False
    table: Annotated[
        bool, typer.Option("--table", help="published times beside ours, for a folder")
    ] = False
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="durations of a recorded run, under the scenario's caps"
        ),
    ] = None
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=2, help="processes that share the seeds")
    ] = 2
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, nothing else")] = False
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV, nothing else")] = False
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="write tables, lanes.png and the scenarios here"),
    ] = None


def run(options: SimulateOptions) -> None:
    """Drive the real scheduler through a run in simulated time; same seed, same result."""
    from opengyre.simulate.compare import Bench
    from opengyre.simulate.repeat import Repeater

    _check(options)
    configs = _configs(options)
    num_seeds = options.seeds or max(one.scenario.num_seeds for one in configs)
    workload = None if options.from_run is None else recorded_workload(options.from_run, configs)
    is_small = num_seeds * len(configs) <= 2 and not options.compare
    with Repeater(1 if is_small else options.processes) as repeater:
        bench = Bench(repeater=repeater, num_seeds=num_seeds, workload=workload)
        if options.table:
            return _print_paper(configs, bench, options)
        _print_runs(_runs(configs, bench, options), options)


simulate = command_of(SimulateOptions, run)


def _check(options: SimulateOptions) -> None:
    """What the options say about each other. Raises ConfigError."""
    is_folder = options.scenario.is_dir()
    has_table, compare = options.table, options.compare
    for is_wrong, words in (
        (options.as_json and options.as_csv, "--json --csv: expected one of them"),
        (options.policy and compare, "--policy --compare: expected one of them"),
        (
            options.best_static and not compare,
            "--best-static: expected --compare and a list of policies beside it",
        ),
        (
            has_table and (options.policy or compare or options.from_run),
            "--table: expected no --policy, --compare or --from beside it",
        ),
        (
            has_table and not is_folder,
            f"--table {options.scenario}: expected a folder of scenario files",
        ),
        (
            compare and is_folder,
            f"--compare {options.scenario}: expected one scenario file, no folder",
        ),
    ):
        if is_wrong:
            raise ConfigError(words)
    _check_policies("--policy", options.policy)
    _check_policies("--compare", compare)


def _check_policies(flag: str, value: str | None) -> None:
    if value is None:
        return
    names = value.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"{flag} {value}: expected {', '.join(POLICIES)}, not {unknown[0]!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{flag} {value}: expected each policy once")


def _configs(options: SimulateOptions) -> list["SimulationConfig"]:
    from opengyre.config.load_simulation import load_simulation, scenario_files

    path = options.scenario
    paths = scenario_files(path) if path.is_dir() else [path]
    configs = [load_simulation(one, options.overrides or ()) for one in paths]
    names = [one.scenario.name for one in configs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: scenario.name = {twice}: expected another name in each file")
    return configs


def _runs(
    configs: list["SimulationConfig"], bench: "Bench", options: SimulateOptions
) -> list["Ran"]:
    from opengyre.simulate.compare import compare, shape_words, under

    if options.compare is not None:
        policies = cast("list[PolicyName]", options.compare.split(","))
        return compare(configs[0], policies, bench, is_best_static=options.best_static)
    if options.policy is None:
        return bench.run(configs)
    chosen = [under(one, cast("PolicyName", options.policy)) for one in configs]
    return bench.run(chosen, [shape_words(one) for one in chosen])


def _print_runs(runs: list["Ran"], options: SimulateOptions) -> None:
    from opengyre.cli.simulated_lanes import lane_lines, write_lanes
    from opengyre.cli.terminal_width import fitting, terminal_columns
    from opengyre.simulate.table import as_csv, as_json, text_rows
    from opengyre.views.tables import table

    is_reference = (one.row for one in runs if one.config.scenario.published_time == 1.0)
    reference = next(is_reference, runs[0].row)
    rows = [as_json(one.row, reference) for one in runs]
    csv_text = as_csv([one.row for one in runs], reference)
    if options.out is not None:
        scenarios = [one.config for one in runs]
        with _writing_to(options.out):
            _write(options.out, rows, csv_text, scenarios)
            write_lanes(runs, options.out / "lanes.png")
    if options.as_json or options.as_csv:
        _print_data(rows, csv_text, options)
    else:
        num_columns = terminal_columns()
        text = text_rows([one.row for one in runs], reference)
        blocks = [table(block) for block in fitting(text, num_columns)]
        lines = [line for block in blocks for line in (*block, "")]
        notes = [f"{one.row.name} {one.row.policy}: {one.row.note}" for one in runs if one.row.note]
        _print_lines([*lines[:-1], *notes, *lane_lines(runs, num_columns)])
    _end({f"{one.row.name} {one.row.policy}": one.row.reason for one in runs})


def _print_paper(
    configs: list["SimulationConfig"], bench: "Bench", options: SimulateOptions
) -> None:
    from opengyre.simulate.paper import as_json, paper_table, text_cells
    from opengyre.simulate.table import csv_of
    from opengyre.views.tables import table

    rows = paper_table(configs, bench)
    data = [as_json(one) for one in rows]
    if options.out is not None:
        with _writing_to(options.out):
            _write(options.out, data, csv_of(data), configs)
    if options.as_json or options.as_csv:
        _print_data(data, csv_of(data), options)
    else:
        _print_lines(table([text_cells(one) for one in rows]))
    _end({one.row: one.reason for one in rows})


def _end(reasons: dict[str, str]) -> None:
    """Exit 1 if a simulated run failed, with the first reason."""
    if failed := next((name for name, reason in reasons.items() if reason), None):
        typer.echo(f"gyre: {failed}: a simulated run failed: {reasons[failed]}", err=True)
        raise typer.Exit(ExitCode.FAILED)


def _print_data(rows: list[dict[str, Any]], csv_text: str, options: SimulateOptions) -> None:
    _print_lines([json.dumps(rows, indent=2) if options.as_json else csv_text.rstrip("\n")])


def _write(
    folder: Path,
    rows: list[dict[str, Any]],
    csv_text: str,
    scenarios: list["SimulationConfig"],
) -> None:
    resolved = [one.model_dump(mode="json") for one in scenarios]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (("table.json", rows), ("scenarios.json", resolved)):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (folder / "table.csv").write_text(csv_text, encoding="utf-8")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--out {folder}: cannot write there: {reason}") from error


def _print_lines(lines: list[str]) -> None:
    """A reader that has gone is no error of ours; a full disk is said. Raises BoundaryError."""
    try:
        for line in lines:
            typer.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BoundaryError("output", error.strerror or str(error), retryable=True) from error
