"""`gyre plan WORKLOAD`: the best layout of a device budget, and whether elasticity pays.

Owns: its options and output. Must not know: how layouts are searched.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from opengyre.cli.options import command_of
from opengyre.cli.recorded_workload import recorded_workload
from opengyre.seams.errors import ConfigError

if TYPE_CHECKING:
    from opengyre.config.simulation import SimulationConfig
    from opengyre.simulate.plan import Plan, Trials
    from opengyre.simulate.plan_layout import Space
    from opengyre.simulate.plan_region import Region

Number = TypeVar("Number", int, float)

MAX_LAYOUTS = 120
NUM_SIZES = 3
SLOT_SHARES = (0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `gyre plan` is told."""

    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="a scenario (*.toml), or durations (*.csv) with --devices and --set beside it",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="one value of the scenario; repeatable"),
    ] = None
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="durations of a recorded run's executions"),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="device budget (the scenario's own devices)"),
    ] = None
    cell_devices: Annotated[
        str | None,
        typer.Option(
            "--cell-devices",
            metavar="N,N,..",
            help="devices a cell may have; the model needs the least (the scenario's x 1, 2, 4)",
        ),
    ] = None
    slots: Annotated[
        str | None,
        typer.Option(
            "--slots",
            metavar="S,S,..",
            help="slots per device to try (the scenario's; fewer too if load slows an engine)",
        ),
    ] = None
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", min=0, max=64, help="bound on phi + mu - 1"),
    ] = None
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="seeds that judge the winners")
    ] = None
    max_layouts: Annotated[
        int, typer.Option("--max-layouts", min=6, help="layouts to try, no more")
    ] = MAX_LAYOUTS
    region: Annotated[
        bool, typer.Option("--region/--no-region", help="where elasticity pays, around this load")
    ] = True
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=2, help="processes that share the seeds")
    ] = 2
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, nothing else")] = False
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="write plan.json and plan.png here"),
    ] = None


def run(options: PlanOptions) -> None:
    """Search layouts of a device budget in simulated time; say whether elasticity pays."""
    from opengyre.config.planning import load_planning
    from opengyre.simulate.compare import Bench
    from opengyre.simulate.plan import Trials, plan
    from opengyre.simulate.plan_region import region
    from opengyre.simulate.repeat import Repeater

    config = load_planning(options.workload, options.overrides or (), num_devices=options.devices)
    workload = None if options.from_run is None else recorded_workload(options.from_run)
    if options.out is not None:
        _open(options.out)
    began_s = monotonic()
    with Repeater(options.processes) as repeater:
        bench = Bench(
            repeater=repeater,
            num_seeds=options.seeds or config.scenario.num_seeds,
            workload=workload,
        )
        trials = Trials(
            config=config,
            space=_space(config, options),
            bench=bench,
            max_layouts=options.max_layouts,
        )
        best = plan(trials)
        where = region(trials, best) if options.region else None
    _print(trials, best, where, options, monotonic() - began_s)


plan = command_of(PlanOptions, run)


def _space(config: "SimulationConfig", options: PlanOptions) -> "Space":
    from opengyre.simulate.plan_layout import Space

    topology, schedule = config.topology, config.schedule
    num_devices = options.devices or topology.num_devices
    sizes = _sizes(topology.devices_per_cell, num_devices)
    if options.cell_devices is not None:
        sizes = _numbers("--cell-devices", options.cell_devices, int)
    elif options.workload is None or options.workload.suffix != ".toml":
        raise ConfigError(
            "--cell-devices: expected the devices a cell may have, where no scenario file says it"
        )
    slots: tuple[float, ...] = (topology.slots_per_device,)
    if config.costs.engine.load_slope > 0:
        slots = tuple(share * topology.slots_per_device for share in SLOT_SHARES)
    if options.slots is not None:
        slots = _numbers("--slots", options.slots, float)
    bound = schedule.max_staleness if options.max_staleness is None else options.max_staleness
    return Space(num_devices=num_devices, cell_devices=sizes, slots=slots, max_staleness=bound)


def _sizes(devices_per_cell: int, num_devices: int) -> tuple[int, ...]:
    """Once, twice, four times the scenario's, as long as two cells fit."""
    sizes = [devices_per_cell * 2**power for power in range(NUM_SIZES)]
    return tuple(sizes[:1] + [one for one in sizes[1:] if 2 * one <= num_devices])


def _numbers(flag: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """Ascending. Raises ConfigError."""
    try:
        values = sorted({kind(word) for word in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: expected numbers with commas between them") from error
    if not 0 < values[0] <= values[-1] <= 1e6:
        raise ConfigError(f"{flag} {text}: expected numbers above 0")
    return tuple(values)


def _print(
    trials: "Trials", best: "Plan", where: "Region | None", options: PlanOptions, spent_s: float
) -> None:
    from opengyre.simulate.plan import verdict
    from opengyre.simulate.plan_words import plan_json, plan_rows, region_lines
    from opengyre.views.tables import table

    data = plan_json(best, trials.space, where)
    if options.out is not None:
        _write(options.out, data, best, where)
    if options.as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    cut = "; stopped at --max-layouts" if best.is_cut_short else ""
    lines = [
        verdict(best),
        f"take {best.best[0].layout.words}",
        "",
        *table(plan_rows(best)),
        *(one.layout.words for one in best.best),
        "",
        *(region_lines(where) if where else []),
        f"{best.num_tried} layouts, {data['num_runs']} runs in {spent_s:.0f} s{cut}",
    ]
    for line in lines:
        typer.echo(line)


def _open(folder: Path) -> None:
    """Before the search, so that it is not made in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write(folder: Path, data: dict[str, Any], best: "Plan", where: "Region | None") -> None:
    from opengyre.cli.plan_picture import draw_plan

    try:
        (folder / "plan.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        draw_plan(best, where, folder / "plan.png")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {folder}: cannot write there: {error.strerror or error}")
