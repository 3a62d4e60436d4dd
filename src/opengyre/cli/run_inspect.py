"""`gyre run inspect RUN [EXECUTION]`: the executions of a run, or the tree of one.

Owns: its options and output. Must not know: how a tree is made or drawn. Invariant: reads only the
run; `--svg` writes the picture and nothing else.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opengyre.cli.options import command_of
from opengyre.seams.errors import ConfigError

if TYPE_CHECKING:
    from opengyre.views.trees import ExecutionTree, RunTrees


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What `gyre run inspect` is told."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")]
    execution: Annotated[
        str, typer.Argument(metavar="[EXECUTION]", help="like e000123; left out: a table of all")
    ] = ""
    is_all: Annotated[
        bool, typer.Option("--all", help="of one execution: a line for each attempt of a turn")
    ] = False
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="draw the tree of one execution")
    ] = None
    group: Annotated[str, typer.Option("--group", help="of all: this group's, like g00012")] = ""
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="of all: those this step consumed")
    ] = None
    best: Annotated[int, typer.Option("--best", min=0, help="of all: so many best rewards")] = 0
    worst: Annotated[int, typer.Option("--worst", min=0, help="of all: so many worst rewards")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False


def run(options: InspectOptions) -> None:
    """Print the tree of one execution: forks, roles, what was trained. Or a table of all."""
    _check(options)
    trees = _open(options.run)
    if options.execution:
        _inspect_one(trees, options)
    else:
        _inspect_all(trees, options)


inspect = command_of(InspectOptions, run)


def _check(options: InspectOptions) -> None:
    """What the options say about each other. Raises ConfigError."""
    if options.best and options.worst:
        raise ConfigError("--best --worst: expected one of them")
    filters = options.group or options.best or options.worst or options.step is not None
    if options.execution and filters:
        raise ConfigError(
            f"{options.execution}: expected no --group, --step, --best or --worst beside it"
        )
    if not options.execution and (options.svg or options.is_all):
        name = "--svg" if options.svg else "--all"
        raise ConfigError(f"{name}: expected the name of an execution, like e000123")


def _open(run: Path) -> "RunTrees":
    from opengyre.store.journal import read_journal
    from opengyre.store.run_folder import open_run_folder, read_json
    from opengyre.trajectory.turns import TRAINED_ROLES
    from opengyre.views.trees import open_trees

    folder = open_run_folder(run)
    training = read_json(folder.config_json).get("training", {})
    roles = training.get("trained_roles", TRAINED_ROLES)
    return open_trees(read_journal(folder.db), trained_roles=roles)


def _inspect_one(trees: "RunTrees", options: InspectOptions) -> None:
    from opengyre.views.tree_json import tree_fields
    from opengyre.views.tree_lines import tree_lines
    from opengyre.views.tree_picture import draw_tree

    known = trees.state.executions
    if options.execution not in known:
        last = f"(the last one is {max(known, default='none')})"
        raise ConfigError(f"{options.execution}: no such execution in {options.run} {last}")
    tree = trees.of(options.execution)
    if options.svg is not None:
        draw_tree(tree, options.svg)
    if options.as_json:
        return _print_json(tree_fields(tree))
    for line in tree_lines(tree, is_all=options.is_all):
        typer.echo(line)


def _inspect_all(trees: "RunTrees", options: InspectOptions) -> None:
    from opengyre.views.tables import table
    from opengyre.views.tree_json import account_fields, execution_cells

    found = _chosen(trees, options)
    if options.as_json:
        return _print_json(
            [
                {
                    **execution_cells(tree),
                    "forks": tree.forks,
                    "tokens": account_fields(tree.account),
                }
                for tree in found
            ]
        )
    for line in table([execution_cells(tree) for tree in found]) or ["no executions"]:
        typer.echo(line)


def _chosen(trees: "RunTrees", options: InspectOptions) -> "list[ExecutionTree]":
    from opengyre.views.tree_json import chosen

    if options.group and options.group not in trees.state.groups:
        raise ConfigError(f"--group {options.group}: no such group in {options.run}")
    every = (trees.of(execution) for execution in trees.state.executions)
    return chosen(
        every,
        group=options.group,
        step=options.step,
        best=options.best,
        worst=options.worst,
    )


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
