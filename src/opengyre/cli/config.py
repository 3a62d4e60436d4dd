"""`gyre config show` and `gyre config schema`.

Owns: their output. Must not know: how values are checked.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from opengyre.cli.errors import GyreGroup

app = typer.Typer(
    cls=GyreGroup,
    no_args_is_help=True,
    help="Show what a config file means, and which keys there are.",
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="the run's config file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="replace one value; may be repeated"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def show(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every key with the value in force. Warnings go to stderr."""
    from opengyre.config.load import load_config, resolved_json
    from opengyre.config.root import config_warnings
    from opengyre.config.toml import resolved_toml

    loaded = load_config(config, overrides or ())
    for warning in config_warnings(loaded):
        typer.echo(f"gyre: warning: {warning}", err=True)
    typer.echo(resolved_json(loaded) if as_json else resolved_toml(loaded), nl=False)


@app.command()
def schema(
    is_scenario: Annotated[
        bool, typer.Option("--scenario", help="the keys of a scenario of `gyre simulate`")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print every key with its default and meaning, or the JSON schema with --json."""
    from opengyre.config.keys import walk
    from opengyre.config.load import config_schema
    from opengyre.config.root import RunConfig
    from opengyre.config.simulation import SimulationConfig

    model = SimulationConfig if is_scenario else RunConfig
    if as_json:
        typer.echo(json.dumps(config_schema(model), indent=2))
        return
    for key in walk(model):
        field = key.field
        default = _default(field.is_required(), field.default_factory, field.default)
        typer.echo(f"{key.path} = {default}\n    {field.description}")


def _default(is_required: bool, factory: object, default: Any) -> str:
    if is_required:
        return "(required)"
    if factory is not None:
        return "(computed)"
    return "(none)" if default is None else json.dumps(default)
