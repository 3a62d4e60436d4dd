"""`gyre train`: one run in the foreground.

Owns: its arguments and output. Must not know: how a run is made.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="the run's config file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="replace one value; may be repeated"),
]
RunDir = Annotated[
    Path | None,
    typer.Option("--run", metavar="FOLDER", help="the run folder (default: a new one in run.dir)"),
]
Unsafe = Annotated[
    bool,
    typer.Option("--unsafe-no-sandbox", help="run agents unconfined where no sandbox is there"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the summary as JSON, nothing else")]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    run: RunDir = None,
    unsafe_no_sandbox: Unsafe = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy: dispatch tasks, sample, grade, update, publish, until the last step."""
    import asyncio

    from opengyre.config.load import load_config
    from opengyre.runtime.prepare import prepare
    from opengyre.runtime.run import train as drive
    from opengyre.runtime.watch import finish, watcher

    prepared = prepare(load_config(config, overrides or ()))
    for warning in prepared.warnings:
        typer.echo(f"gyre: warning: {warning}", err=True)
    for line in prepared.memory:
        typer.echo(f"gyre: memory of {line}", err=True)
    section = prepared.config.run
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = run or section.dir / f"{section.name}-{stamp}-s{section.seed}"
    ended = asyncio.run(
        drive(prepared, folder, is_unsafe_allowed=unsafe_no_sandbox, watch=watcher(as_json))
    )
    finish(ended, as_json=as_json)
    raise typer.Exit(ended.exit_code)
