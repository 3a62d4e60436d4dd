"""`gyre`: one file per subcommand, put together here.

Owns: the list of subcommands. Must not know: what they do. Each imports heavy modules inside its
function, so that `gyre --help` stays quick.
"""

from typing import Annotated

import typer

from opengyre.cli import config, gateway, harness, plan, run, simulate, train
from opengyre.cli.errors import GyreGroup

app = typer.Typer(
    cls=GyreGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train long-horizon LLM agents on GPUs that change jobs while the agents live on.",
)
app.command()(train.train)
app.command(name="simulate")(simulate.simulate)
app.command(name="plan")(plan.plan)
app.command(name="gateway")(gateway.gateway)
app.add_typer(run.run_app, name="run")
app.add_typer(config.app, name="config")
app.add_typer(harness.app, name="harness")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"gyre {version('opengyre')}")
        raise typer.Exit


@app.callback()
def gyre(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Exit codes: 0 done, 1 the run failed, 2 the user's input, 3 interrupted."""
