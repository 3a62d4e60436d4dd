"""`gyre plan`: the best layout, data, a picture, and refusals in one line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from recorded_run import record
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.store.journal import open_journal
from opengyre.store.run_folder import create_run_folder

TINY = """
[scenario]
num_steps = 3
num_seeds = 2
[topology]
num_cells = 4
devices_per_cell = 1
slots_per_device = 4.0
[schedule]
group_size = 2
groups_per_step = 2
steps_per_burst = 1
run_ahead = 1
max_staleness = 1
[costs.training]
group_device_s = 100.0
[workload]
mean_s = 300.0
sigma_within = 0.4
"""
QUICK = ("--processes", "1", "--max-layouts", "12")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def gyre(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def planned(*arguments: object) -> dict[str, Any]:
    code, out, err = gyre(*arguments, *QUICK, "--json")
    assert (code, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    return data


def refusal(*arguments: object) -> str:
    code, out, err = gyre(*arguments, *QUICK)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_the_plan_for_people_leads_with_the_verdict_and_ends_with_what_it_took(
    tiny: Path,
) -> None:
    code, out, _ = gyre(tiny, *QUICK, "--no-region")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("elasticity ")
    assert lines[1].startswith("take ")
    assert any(line.startswith("async: ") for line in lines)
    assert "12 layouts, " in lines[-1]
    assert lines[-1].endswith("s; stopped at --max-layouts")


def test_the_region_is_in_the_data_and_in_the_picture(tiny: Path, tmp_path: Path) -> None:
    data = planned(tiny, "--out", tmp_path / "out")
    points = data["region"]["workloads"]
    assert {one["training_share"] for one in points} == {0.1, 0.25, 0.5, 0.75, 0.9}
    assert [one["num_cells"] for one in data["region"]["cell_counts"]] == [2, 4]
    low, high = (
        [one["static_training_devices"] for one in points if one["training_share"] == share]
        for share in (0.1, 0.9)
    )
    assert max(low) < min(high)
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == data
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_the_same_each_time(tiny: Path) -> None:
    assert planned(tiny, "--no-region") == planned(tiny, "--no-region")


def test_the_budget_and_the_cells_are_those_asked_for(tiny: Path) -> None:
    data = planned(tiny, "--no-region", "--devices", 6, "--cell-devices", "2,3")
    assert data["num_devices"] == 6
    assert all(one["num_devices_used"] <= 6 for one in data["layouts"])
    cells = [one for one in data["layouts"] if one["policy"] == "elastic"]
    assert cells[0]["devices_per_cell"] in (2, 3)


def test_the_staleness_bound_bounds_mu_and_phi(tiny: Path) -> None:
    data = planned(tiny, "--no-region", "--max-staleness", 0)
    shapes = {(one["steps_per_burst"], one["run_ahead"]) for one in data["layouts"]}
    assert shapes == {(1, 0)}


def test_where_switching_takes_longer_than_an_execution_elasticity_is_not_sold(
    tiny: Path,
) -> None:
    data = planned(tiny, "--no-region", "--set", "costs.switch.enter_training_s=3000")
    assert data["does_elasticity_pay"] is False
    assert data["best"]["policy"] == "async"
    assert data["verdict"].startswith("elasticity does not pay here: the best static split is ")


def test_recorded_durations_and_values_beside_them_make_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "durations.csv"
    path.write_text("group,duration_s\na,100\na,300\nb,200\nb,500\n")
    values = [
        "topology.slots_per_device=4",
        "costs.training.group_device_s=100",
        "scenario.num_steps=3",
        "schedule.groups_per_step=2",
        "schedule.group_size=2",
        "schedule.supply_fraction=0.5",
    ]
    sets = [word for value in values for word in ("--set", value)]
    budget = ("--devices", 4, "--cell-devices", 1, "--no-region")
    assert planned(path, *sets, *budget)["best"]["num_devices_used"] == 4
    lognormal = ("--set", "workload.mean_s=300")
    assert planned(*sets, *lognormal, *budget)["best"]["num_devices_used"] == 4


def test_a_recorded_run_gives_the_durations(tiny: Path, tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "runs" / "a", {"seed": 7})
    rows = record(folder.tokens).rows

    async def write() -> None:
        async with open_journal(folder.db) as journal:
            for row in rows:
                journal.append(row.now_s, row.value)

    asyncio.run(write())
    as_written, as_recorded = (
        planned(tiny, "--no-region", *more)["best"]["groups_per_hour"]
        for more in ((), ("--from", folder.path))
    )
    assert as_recorded > 2 * as_written


def test_bad_input_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    assert "no such config file" in refusal(tmp_path / "no.toml")
    assert "expected a scenario (*.toml) or durations (*.csv)" in refusal(tmp_path / "a.txt")
    assert "--devices: expected the device budget" in refusal()
    assert "device budget 3: expected at least 4" in refusal(
        tiny, "--devices", 3, "--cell-devices", 4
    )
    assert "--cell-devices x: expected numbers" in refusal(tiny, "--cell-devices", "x")
    assert "--slots 0: expected numbers above 0" in refusal(tiny, "--slots", "0")
    assert "schedule.foo: unknown key" in refusal(tiny, "--set", "schedule.foo=1")
    assert "--cell-devices: expected the devices a cell may have" in refusal(
        "--devices", 4, "--set", "workload.mean_s=1", "--set", "topology.slots_per_device=1",
        "--set", "costs.training.group_device_s=1",
    )  # fmt: skip


def test_a_folder_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = refusal(tiny, "--no-region", "--out", tmp_path / "file" / "out")
    assert "--out" in words
    assert "cannot write there" in words
