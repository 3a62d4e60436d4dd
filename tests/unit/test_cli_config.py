"""`gyre` answers in one line and by its exit codes."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opengyre.cli.errors import ExitCode, GyreGroup
from opengyre.cli.main import app
from opengyre.seams.errors import BoundaryError

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "quickstart.toml"
gyre = CliRunner()


def test_help_and_version_name_the_program() -> None:
    words = gyre.invoke(app, ["--help"]).stdout
    assert all(command in words for command in ("train", "run", "config"))
    assert gyre.invoke(app, ["--version"]).stdout.startswith("gyre 0.")


def test_show_prints_every_value_in_force_as_toml_or_json() -> None:
    shown = gyre.invoke(app, ["config", "show", str(QUICKSTART), "--set", "run.seed=7"])
    assert shown.exit_code == ExitCode.DONE
    assert "seed = 7" in shown.stdout
    as_json = gyre.invoke(app, ["config", "show", str(QUICKSTART), "--json"])
    assert json.loads(as_json.stdout)["schedule"]["max_staleness"] == 4


def test_show_warns_on_stderr_and_still_prints(tmp_path: Path) -> None:
    text = '[run]\ndir="r"\nnum_steps=1\n[model]\npath="m"\n[[tasks]]\npath="t"\n'
    path = tmp_path / "a.toml"
    path.write_text(text)
    shown = gyre.invoke(app, ["config", "show", str(path)])
    assert shown.exit_code == ExitCode.DONE
    assert shown.stderr.startswith("gyre: warning: schedule.run_ahead")


def test_bad_input_is_one_line_on_stderr_and_exit_2() -> None:
    shown = gyre.invoke(app, ["config", "show", str(QUICKSTART), "--set", "schedule.grup_size=1"])
    assert shown.exit_code == ExitCode.BAD_INPUT
    assert shown.stdout == ""
    assert shown.stderr == (
        f"gyre: {QUICKSTART}: schedule.grup_size: unknown key; did you mean schedule.group_size?\n"
    )


def test_schema_lists_keys_for_people_and_for_programs() -> None:
    assert "schedule.supply_fraction = 0.125" in gyre.invoke(app, ["config", "schema"]).stdout
    schema = json.loads(gyre.invoke(app, ["config", "schema", "--json"]).stdout)
    assert "ScheduleConfig" in schema["$defs"]
    of_a_scenario = gyre.invoke(app, ["config", "schema", "--scenario"]).stdout
    assert "costs.training.efficiency = 0.95" in of_a_scenario


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BoundaryError("disk", "no space left", retryable=False), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_expected_errors_end_in_their_exit_code(error: BaseException, code: ExitCode) -> None:
    program = typer.Typer(cls=GyreGroup)

    @program.command()
    def stop() -> None:
        raise error

    @program.command()
    def other() -> None: ...

    ended = gyre.invoke(program, ["stop"])
    assert ended.exit_code == code
    assert ended.stderr.startswith("gyre: ")
    assert ended.stderr.count("\n") == 1
