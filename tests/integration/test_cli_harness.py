"""`gyre harness`: what there is, and one execution from launch to verdict."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opengyre.cli.errors import ExitCode
from opengyre.cli.main import app
from opengyre.harness.profiles import stage_agent
from opengyre.runtime.trying.example_task import write_example_task

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
gyre = CliRunner()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder without .harnesses, and a PATH without agents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that agents under other user ids reach."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-try-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def tried(*arguments: str) -> dict[str, Any]:
    told = gyre.invoke(app, ["harness", "try", *arguments, "--json"])
    report: dict[str, Any] = json.loads(told.stdout)
    code = ExitCode.DONE if report["is_valid"] else ExitCode.FAILED
    assert told.exit_code == code
    return report


def test_list_names_every_profile_and_says_what_is_missing(elsewhere: Path) -> None:
    rows = json.loads(gyre.invoke(app, ["harness", "list", "--json"]).stdout)
    by_name = {row["name"]: row for row in rows}
    assert by_name["gyre-agent"]["problem"] == ""
    assert "npm install" in by_name["codex"]["problem"]
    words = gyre.invoke(app, ["harness", "list"]).stdout
    assert all(name in words for name in by_name)


def test_a_program_that_is_not_installed_is_one_line_and_exit_code_2(elsewhere: Path) -> None:
    told = gyre.invoke(app, ["harness", "try", "codex"])
    assert told.exit_code == ExitCode.BAD_INPUT
    assert told.stderr == (
        "gyre: codex needs the program codex, which is not there: npm install -g "
        "@openai/codex@0.171.0, or `make harnesses` in a checkout\n"
    )


def test_the_bundled_agent_solves_the_example_by_a_script(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    report = tried("gyre-agent", "--keep", str(kept))
    assert report["is_valid"]
    assert (report["outcome"], report["reward"], report["exit_code"]) == ("completed", 1.0, 0)
    assert report["num_requests"] == report["num_committed_turns"] == 3
    assert report["turns_by_role"] == {"main": 3}
    assert report["num_trainable_tokens"] == report["num_sampled_tokens"] > 0
    assert (kept / "workspace" / "out").read_text() == "190\n"
    assert list((kept / "tokens").glob("*.seg"))


def test_words_for_a_person_say_the_same(tmp_path: Path) -> None:
    told = gyre.invoke(app, ["harness", "try", "gyre-agent"])
    assert told.exit_code == ExitCode.DONE
    assert "3 committed (3 main)" in told.stdout
    assert told.stdout.endswith("gyre-agent is valid\n")


def test_an_agent_that_asks_nothing_is_not_valid() -> None:
    report = tried("command", "/bin/true")
    assert report["outcome"] == "completed"
    assert report["num_requests"] == 0
    assert [problem.split(":")[0] for problem in report["problems"]] == [
        "no token of it can be trained",
        "the known solution got a reward of 0",
    ]


def test_a_users_own_profile_and_task_are_tried(open_folder: Path) -> None:
    agent = stage_agent(open_folder)
    (open_folder / "mine.toml").write_text(
        "[launch]\n"
        f'readable = ["{agent}"]\n'
        f'argv = ["/usr/bin/python3", "{agent}", "--instruction-file", "{{home}}/told.md",\n'
        '        "--max-output-tokens", "500"]\n'
        '[[launch.files]]\npath = "told.md"\ntext = "{instruction}"\n'
        '[[labels]]\nrole = "sub-agent"\nall = [{ header = "user-agent", matches = "gyre" }]\n'
    )
    task = write_example_task(open_folder / "task")
    report = tried(str(open_folder / "mine.toml"), "--task", str(task))
    assert report["is_valid"], report
    assert report["turns_by_role"] == {"sub-agent": 3}


def test_a_model_answers_instead_of_a_script() -> None:
    report = tried("gyre-agent", "--model", str(MODEL))
    assert report["outcome"] == "completed"
    assert report["is_valid"]
    assert report["num_trainable_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "nobody: no such harness; expected one of claude-code"),
        (["command"], "harness.command is empty: expected a program and its arguments"),
        (["gyre-agent", "/bin/true"], "gyre-agent has a command line of its own"),
        (["gyre-agent", "--task", "/nonexistent"], "task.toml is missing"),
        (["gyre-agent", "--model", "/nonexistent"], "no such folder"),
        (["gyre-agent", "--engine", "http://127.0.0.1:9"], "--engine needs --model FOLDER"),
        (["gyre-agent", "--keep", "/"], "--keep /: is there already"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(arguments: list[str], words: str) -> None:
    told = gyre.invoke(app, ["harness", "try", *arguments])
    assert told.exit_code == ExitCode.BAD_INPUT
    assert words in told.stderr
    assert told.stderr.count("\n") == 1


def test_a_task_without_a_solution_needs_a_model(tmp_path: Path) -> None:
    task = write_example_task(tmp_path / "task")
    (task / "solution" / "solve.sh").unlink()
    told = gyre.invoke(app, ["harness", "try", "gyre-agent", "--task", str(task)])
    assert told.exit_code == ExitCode.BAD_INPUT
    assert "has no solution/solve.sh" in told.stderr
