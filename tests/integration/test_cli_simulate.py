"""`gyre simulate`: tables, data, lanes, comparisons, and refusals in one line."""

import asyncio
import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_run import record
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.store.journal import open_journal
from opengyre.store.run_folder import create_run_folder

SMALL = """
[scenario]
num_steps = 6
num_seeds = 2
[topology]
num_cells = 4
devices_per_cell = 2
slots_per_device = 4.0
[schedule]
group_size = 4
groups_per_step = 4
[costs.training]
group_device_s = 60.0
[workload]
mean_s = 600.0
sigma_between = 0.3
sigma_within = 0.3
harness_cap_s = 1200.0
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = create_run_folder(tmp_path_factory.mktemp("runs") / "a", {"seed": 7})
    tape = record(folder.tokens)

    async def write() -> None:
        async with open_journal(folder.db) as journal:
            for row in tape.rows:
                journal.append(row.now_s, row.value)

    asyncio.run(write())
    return folder.path


def gyre(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["simulate", *(str(one) for one in arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    code, out, err = gyre(*arguments, "--json", "--processes", "1")
    assert (code, err) == (0, "")
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


def test_the_table_names_its_figures_and_the_lanes_show_cells_in_training(small: Path) -> None:
    code, out, _ = gyre(small, "--processes", "1")
    assert code == 0
    head, *rest = out.splitlines()
    assert head.split() == ["small", "elastic"]
    figures = {text[:24].strip() for text in rest}
    for name in ("wall time", "ratio", "executions / device-hour", "generating", "moving"):
        assert name in figures
    for name in ("slack of training", "staleness 0/1/..", "moves / execution", "aborted work"):
        assert name in figures
    lanes = {text.split()[0]: text for text in rest if text.split()[:1]}
    assert all("#" in lanes[cell] for cell in ("c0", "c1"))
    assert set(lanes["c3"].split()[1]) <= set(".#x|")


def test_json_has_every_figure_and_its_device_seconds_add_up(small: Path) -> None:
    (row,) = rows_of(small)
    assert row["name"] == "small"
    assert row["num_seeds"] == 2
    assert row["num_devices"] == 8
    assert row["ratio"] == 1.0
    assert row["aborted_s"] == 0.0
    assert row["failed"] is False
    assert sum(row["device_seconds"].values()) == pytest.approx(8 * row["wall_s"])
    assert sum(row["staleness"].values()) == 2 * 6 * 4
    assert 0 < row["slack"] < 1
    assert 0 < row["timed_out_share"] < 0.5
    assert 0 < row["switch_share"] < 0.1


def test_the_same_seeds_give_the_same_rows_in_one_process_and_in_two(small: Path) -> None:
    alone = rows_of(small, "--seeds", "3")
    _, out, _ = gyre(small, "--seeds", "3", "--json")
    assert json.loads(out) == alone
    assert rows_of(small, "--seeds", "1") != alone


def test_csv_has_the_figures_of_json(small: Path) -> None:
    (row,) = rows_of(small)
    _, out, _ = gyre(small, "--csv", "--processes", "1")
    (line,) = csv.DictReader(io.StringIO(out))
    assert float(line["wall_s"]) == row["wall_s"]
    assert float(line["device_seconds.training"]) == row["device_seconds"]["training"]


def test_a_value_can_be_replaced(small: Path) -> None:
    (row,) = rows_of(small)
    (slower,) = rows_of(small, "--set", "workload.mean_s=1200.0")
    assert slower["wall_s"] > 1.2 * row["wall_s"]


def test_out_gets_the_table_and_a_picture(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "one"
    assert gyre(small, "--seeds", "1", "--out", out)[0] == 0
    written = sorted(path.name for path in out.iterdir())
    assert written == ["lanes.png", "scenarios.json", "table.csv", "table.json"]
    assert json.loads((out / "scenarios.json").read_text())[0]["schedule"]["max_staleness"] == 3
    assert (out / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "table.json").read_text())[0]["name"] == "small"


def test_policies_are_compared_on_one_trace_and_the_split_is_stated(small: Path) -> None:
    rows = rows_of(small, "--compare", "elastic,colocate,async", "--best-static")
    assert [row["policy"] for row in rows] == ["elastic", "colocate", "async"]
    assert rows[0]["ratio"] == 1.0
    assert rows[1]["note"].startswith("the best of all: mu ")
    assert rows[2]["note"].startswith("the best of all: ")
    assert " of 4 cells train, mu " in rows[2]["note"]
    fixed = rows_of(small, "--compare", "async")
    assert fixed[0]["note"].startswith("2 of 4 cells train")
    assert rows[2]["wall_s"] <= fixed[0]["wall_s"]


def test_the_durations_of_a_recorded_run_can_be_simulated(small: Path, recorded: Path) -> None:
    (row,) = rows_of(small, "--from", recorded)
    (again,) = rows_of(small, "--from", recorded, "--set", "workload.mean_s=5.0")
    assert again["wall_s"] == row["wall_s"]
    assert row["wall_s"] < rows_of(small)[0]["wall_s"]


def test_a_simulated_run_that_fails_is_shown_and_ends_with_exit_1(small: Path) -> None:
    code, out, err = gyre(small, "--seeds", "1", "--set", "workload.void_rate=0.99", "--json")
    assert code == 1
    assert json.loads(out)[0]["failed"] is True
    assert err.startswith("gyre: small elastic: a simulated run failed: ")


def test_a_run_that_planned_deaths_leave_without_engines_has_failed(small: Path) -> None:
    deaths = ", ".join(f'{{at_s=1000.0, engine="c{number}"}}' for number in (2, 3))
    told = ["--policy", "async", "--set", f"failures=[{deaths}]", "--seeds", "1"]
    code, out, err = gyre(small, *told)
    assert code == 1
    assert "every engine that rolls out has been gone for 600 s" in err
    assert "(failed)" in out.splitlines()[1]


def test_a_split_that_fails_is_not_the_best_one(small: Path) -> None:
    deaths = ", ".join(f'{{at_s=1.0, engine="c{number}"}}' for number in (1, 2))
    told = ["--compare", "async", "--best-static", "--set", f"failures=[{deaths}]"]
    (row,) = rows_of(small, "--seeds", "1", *told)
    assert row["failed"] is False
    code, out, _ = gyre(small, *told[:2], *told[3:], "--set", "schedule.num_training_cells=0")
    assert code == 0, out


def test_caps_of_the_scenario_apply_to_a_recorded_run(small: Path, recorded: Path) -> None:
    cut = rows_of(small, "--from", recorded, "--set", "workload.harness_cap_s=0.001")
    assert cut[0]["timed_out_share"] == 1.0


def test_a_narrow_terminal_gets_columns_and_lanes_that_fit(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "42")
    told = ["--compare", "elastic,colocate", "--seeds", "1", "--processes", "1"]
    _, out, _ = gyre(small, *told)
    lines = out.splitlines()
    assert [line.split() for line in lines if line.startswith("  " * 13)] == [
        ["small", "elastic"],
        ["small", "colocate"],
    ]
    assert max(len(line) for line in lines if "mu" not in line and "rollout" not in line) <= 42
    monkeypatch.setenv("COLUMNS", "200")
    assert gyre(small, *told)[1].splitlines()[0].split() == [
        "small",
        "elastic",
        "small",
        "colocate",
    ]


def test_a_full_disk_is_one_line_and_exit_1(small: Path) -> None:
    start = "from opengyre.cli.main import app; app()"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", start, "simulate", str(small), "--seeds", "1"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60.0,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, b"gyre: output: No space left on device\n")


def test_a_folder_is_a_table_of_its_scenarios(small: Path) -> None:
    for name, cells, published in (("w", 3, 1.2), ("x", 4, 1.0), ("y", 2, 1.5)):
        (small.parent / f"{name}.toml").write_text(
            f'extends = "small.toml"\n[scenario]\npublished_time = {published}\n'
            f"[topology]\nnum_cells = {cells}\n"
        )
    assert [row["name"] for row in rows_of(small.parent)] == ["w", "x", "y"]
    assert rows_of(small.parent)[1]["ratio"] == 1.0
    (small.parent / "w.toml").unlink()
    table = rows_of(small.parent, "--table", "--seeds", "1")
    assert [row["row"] for row in table] == ["x", "y"]
    assert table[0]["ours"] == 1.0
    assert table[1]["relative_error"] == pytest.approx(table[1]["ours"] / 1.5 - 1)
    code, out, _ = gyre(small.parent, "--table", "--seeds", "1")
    assert code == 0
    assert out.splitlines()[0].split()[:4] == ["row", "published", "ours", "error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.toml"], "no such config file"),
        (["small.toml", "--set", "schedule.mu=2"], "schedule.mu: unknown key"),
        (["small.toml", "--set", "costs.training.group_device_s=1e12"], "small: no end after"),
        (["small.toml", "--policy", "greedy"], "expected elastic, colocate, async"),
        (["small.toml", "--compare", "elastic,"], "expected elastic, colocate, async"),
        (["small.toml", "--compare", "async,async"], "expected each policy once"),
        (["small.toml", "--table"], "expected a folder of scenario files"),
        ([".", "--table"], "scenario.published_time is missing"),
        (["small.toml", "--best-static"], "expected --compare and a list"),
        (["small.toml", "--json", "--csv"], "expected one of them"),
        (["small.toml", "--from", "nowhere"], "no such run folder"),
        (["small.toml", "--compare", "async", "--set", "topology.num_cells=1"], "num_cells = 1"),
        (["small.toml", "--out", "small.toml/x"], "cannot write there"),
        (["small.toml", "--out", "blocked"], "cannot write there: Is a directory"),
        (["small.toml", "--from", "a" * 300], "cannot read it: File name too long"),
        (["small.toml", "--set", "costs.switch.load_s=1e9"], "no end after 1e+09 s of simulated"),
        ([".", "--set", "scenario.name=one"], "expected another name in each file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    small: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(small.parent)
    (small.parent / "blocked" / "lanes.png").mkdir(parents=True)
    (small.parent / "other.toml").write_text(SMALL)
    code, out, err = gyre(*arguments, *(["--seeds", "1"] if "--json" not in arguments else []))
    assert code == 2
    assert out == ""
    assert words in err
    assert err.startswith("gyre: ")
    assert err.count("\n") == 1


def until_at_work(running: "subprocess.Popen[bytes]") -> None:
    """Return a moment after it has started the processes that do its work."""
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    deadline_s = time.monotonic() + 60
    while not children.read_text():
        assert time.monotonic() < deadline_s, "it has started no process"
        time.sleep(0.05)
    time.sleep(1.5)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 3, "gyre: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
)
def test_an_end_in_the_middle_is_quick_and_leaves_no_process(
    small: Path, number: signal.Signals, code: int, words: str
) -> None:
    start = "from opengyre.cli.main import app; app()"
    long = ["--set", "scenario.num_steps=20000", "--seeds", "4"]
    running = subprocess.Popen(
        [sys.executable, "-c", start, "simulate", str(small), *long],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until_at_work(running)
        running.send_signal(number)
        # stderr is at its end when the last process that has inherited it is gone
        _, err = running.communicate(timeout=60.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == code
    assert err.decode().startswith(words)
    assert b"Traceback" not in err
