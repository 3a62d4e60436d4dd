"""`gyre harness list` and `gyre harness try`.

Owns: their arguments and output. Must not know: how a harness is launched or judged.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opengyre.cli.errors import ExitCode, GyreGroup
from opengyre.cli.options import command_of

if TYPE_CHECKING:
    from opengyre.runtime.trying.report import TryReport

app = typer.Typer(
    cls=GyreGroup,
    no_args_is_help=True,
    help="See which agent programs there are, and try one.",
)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON, nothing else")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOptions:
    """The arguments of `gyre harness try`."""

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="a name of `gyre harness list`, or a .toml file")
    ]
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help='the command line, with NAME "command"'),
    ] = None
    task: Annotated[
        Path | None, typer.Option(metavar="DIR", help="a task folder (default: a small example)")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="a model that answers (default: a script)"),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="a vLLM or SGLang server of --model (default: run it)"),
    ] = None
    program: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the program, if it is not found by itself")
    ] = None
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="keep workspace, home and token records there"),
    ] = None
    timeout_s: Annotated[float, typer.Option(min=1.0, help="longest time it may run")] = 300.0
    unsafe_no_sandbox: Annotated[
        bool,
        typer.Option("--unsafe-no-sandbox", help="run it unconfined where there is no sandbox"),
    ] = False
    as_json: AsJson = False


@app.command(name="list")
def list_harnesses(as_json: AsJson = False) -> None:
    """Print the shipped profiles, and where the program of each is on this machine."""
    from opengyre.config.base import SHIPPED_HARNESSES
    from opengyre.config.harness_profile import load_profile
    from opengyre.harness.programs import find_program
    from opengyre.seams.errors import ConfigError

    rows = []
    for profile in map(load_profile, SHIPPED_HARNESSES):
        try:
            program = find_program(profile)
            place, problem = ("" if program is None else str(program.path)), ""
        except ConfigError as error:
            place, problem = "", str(error)
        row = {"name": profile.name, "about": profile.about, "program": place, "problem": problem}
        rows.append(row)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['name']:20} {row['about']}")
        if note := row["problem"] or row["program"]:
            typer.echo(f"{'':20} {note}")


def _try(options: TryOptions) -> None:
    """Run one execution of a harness in its sandbox, on a task, and say whether all is well."""
    import asyncio

    from opengyre.runtime.trying.run import TryAsked, try_harness

    asked = TryAsked(
        harness=options.name,
        command=tuple(options.command or ()),
        program=options.program,
        task=options.task,
        model=options.model,
        engine=options.engine,
        keep=options.keep,
        timeout_s=options.timeout_s,
        is_unsafe_allowed=options.unsafe_no_sandbox,
    )
    report = asyncio.run(try_harness(asked))
    if options.as_json:
        typer.echo(json.dumps({"is_valid": report.is_valid, **asdict(report)}, indent=2))
    else:
        _print(report)
    raise typer.Exit(ExitCode.DONE if report.is_valid else ExitCode.FAILED)


app.command(name="try")(command_of(TryOptions, _try))


def _print(report: "TryReport") -> None:
    reward = "none" if report.reward is None else f"{report.reward:g}"
    roles = ", ".join(f"{number} {role}" for role, number in report.turns_by_role.items())
    rows = {
        "outcome": f"{report.outcome} ({report.reason}) in {report.wall_s:.1f} s",
        "reward": f"{reward} ({report.verdict})",
        "requests": f"{report.num_requests} by {', '.join(report.protocols) or 'none'}",
        "turns": f"{report.num_committed_turns} committed ({roles or 'none'})",
        "tokens": f"{report.num_sampled_tokens} sampled, {report.num_trainable_tokens} trainable "
        f"in {report.num_paths} paths",
    }
    if report.forks:
        rows["forks"] = ", ".join(f"{number} {fork}" for fork, number in report.forks.items())
    for name, words in rows.items():
        typer.echo(f"{name:10} {words}")
    for problem in report.problems:
        typer.echo(f"problem    {problem}")
    if report.problems:
        typer.echo("its last words:\n" + report.output_tail[-2000:].rstrip())
    typer.echo(f"{report.harness} is {'valid' if report.is_valid else 'not valid'}")
