"""`gyre run ...` on a whole run folder, on a damaged one and on what is none."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from recorded_run import record
from typer.testing import CliRunner

from opengyre.cli.run import run_app
from opengyre.store.journal import open_journal
from opengyre.store.run_folder import create_run_folder
from opengyre.views.fold import fold


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = create_run_folder(tmp_path_factory.mktemp("runs") / "a", {"seed": 7})
    tape = record(folder.tokens)

    async def write() -> None:
        async with open_journal(folder.db) as journal:
            for row in tape.rows:
                journal.append(row.now_s, row.value)

    asyncio.run(write())
    return folder.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def gyre(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(run_app, [str(one) for one in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_show_prints_the_summary_and_the_steps(run: Path) -> None:
    code, text, errors = gyre("show", run)
    assert (code, errors) == (0, "")
    assert "0.250 before, 0.750 after (+0.500)" in text
    assert "66 sampled, 54 trained (82%)" in text
    assert "step  version  groups" in text
    code, text, _ = gyre("show", run, "--json")
    told = json.loads(text)
    assert told["mid_batch_joins"] == 1
    assert [one["step"] for one in told["steps"]] == [0, 1]


def test_verify_passes_a_whole_run_and_says_what_it_counted(run: Path) -> None:
    code, text, _ = gyre("verify", run)
    assert code == 0
    verdicts = {line.split()[0]: line.split()[1] for line in text.splitlines()}
    promises = [
        *("P1", "P2", "P3", "P4", "P5", "P6", "P8", "P10", "P11", "P12", "P16"),
    ]
    assert verdicts.pop("66") == "tokens"
    assert verdicts.pop("dropped:") == "12"
    assert verdicts.pop("1") == "handed"
    assert verdicts == dict.fromkeys(promises, "pass")
    assert "(10 executions)" in text
    code, text, _ = gyre("verify", run, "--json")
    assert all(one["is_kept"] for one in json.loads(text))


def test_verify_fails_with_exit_1_when_a_table_or_a_segment_was_changed(run: Path) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE executions SET outcome='lost' WHERE execution='e000003'")
    segment = run / "tokens" / "0000.seg"
    data = bytearray(segment.read_bytes())
    data[-3] ^= 1
    segment.write_bytes(data)
    code, text, _ = gyre("verify", run)
    assert code == 1
    assert "e000003: the executions table says lost, the journal completed" in text
    assert "e000010.t0 attempt 1: tokens: segment 0" in text


def test_inspect_shows_the_tree_of_one_execution_and_its_attempts(run: Path) -> None:
    code, text, _ = gyre("inspect", run, "e000002")
    assert code == 0
    assert text.startswith("e000002  group g00001, task trail-2, completed, step 0")
    code, text, _ = gyre("inspect", run, "e000002", "--all")
    assert "2@c0/v0 4@s0/v0" in text
    code, text, _ = gyre("inspect", run, "e000002", "--json")
    assert [one["turn"] for one in json.loads(text)["turns"]] == ["t0"]
    assert json.loads(text)["tokens"]["trained"] == 6
    code, text, _ = gyre("inspect", run, "e000002", "--svg", run / "tree.svg")
    assert code == 0
    assert (run / "tree.svg").read_text().startswith("<svg ")
    code, _, errors = gyre("inspect", run, "e999999")
    assert code == 2
    assert errors.strip() == f"gyre: e999999: no such execution in {run} (the last one is e000010)"


def test_inspect_without_an_execution_is_a_table_that_can_be_narrowed(run: Path) -> None:
    code, text, _ = gyre("inspect", run)
    assert code == 0
    assert len(text.splitlines()) == 1 + 10
    code, text, _ = gyre("inspect", run, "--group", "g00001", "--worst", 1)
    assert [line.split()[0] for line in text.splitlines()] == ["execution", "e000002"]
    code, text, _ = gyre("inspect", run, "--step", 1, "--json")
    told = json.loads(text)
    assert [one["execution"] for one in told] == [f"e{n:06d}" for n in (6, 7, 8, 9)]
    assert {one["tokens"]["trained"] for one in told} == {6}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--best", 1, "--worst", 1), "--best --worst: expected one of them"),
        (("e000001", "--step", 0), "e000001: expected no --group, --step, --best or --worst"),
        (("--svg", "tree.svg"), "--svg: expected the name of an execution, like e000123"),
        (("--all",), "--all: expected the name of an execution, like e000123"),
        (("--group", "g00099"), "--group g00099: no such group in "),
    ],
)
def test_what_inspect_cannot_do_together_is_refused(
    run: Path, arguments: tuple[object, ...], words: str
) -> None:
    code, text, errors = gyre("inspect", run, *arguments)
    assert (code, text) == (2, "")
    assert errors.startswith(f"gyre: {words}")


def test_report_draws_a_png_of_1600_by_1200_into_the_run_folder_or_elsewhere(run: Path) -> None:
    code, text, _ = gyre("report", run)
    assert code == 0
    assert text.strip() == str(run / "report.png")
    code, _, _ = gyre("report", run, "-o", run / "other.png")
    assert code == 0
    for name in ("report.png", "other.png"):
        head = (run / name).read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        size = (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
        assert size == (1600, 1200)
    assert not list(run.glob("*.partial"))


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    from opengyre.views.report import draw_report

    draw_report(fold([]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


@pytest.mark.parametrize("command", ["show", "report", "verify", "replay"])
def test_what_is_no_run_folder_is_refused_in_one_line_with_exit_2(
    command: str, tmp_path: Path
) -> None:
    code, text, errors = gyre(command, tmp_path / "nowhere")
    assert (code, text) == (2, "")
    assert errors.strip() == f"gyre: {tmp_path / 'nowhere'}: no such run folder"
    (tmp_path / "run.db").write_bytes(b"nothing of the kind")
    code, text, errors = gyre(command, tmp_path)
    assert code == 2
    assert len(errors.strip().splitlines()) == 1
    assert "not a run.db" in errors
