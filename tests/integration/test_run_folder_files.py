"""The run folder and its checkpoints on a real file system."""

from pathlib import Path

import pytest

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.store.checkpoints import MANIFEST, Checkpoints
from opengyre.store.run_folder import create_run_folder, open_run_folder, read_json


def test_a_new_run_folder_holds_its_config_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "a" / "run", {"seed": 3, "eval": {"every_bursts": 1}})
    assert read_json(folder.config_json) == {"seed": 3, "eval": {"every_bursts": 1}}
    assert sorted(one.name for one in (tmp_path / "a").iterdir()) == ["run"]
    names = sorted(one.name for one in folder.path.iterdir())
    assert names == ["checkpoints", "config.json", "logs", "tokens"]


def test_an_empty_folder_may_be_used_but_an_existing_run_is_refused_untouched(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    folder = create_run_folder(path, {"seed": 1})
    folder.db.write_bytes(b"x")
    with pytest.raises(ConfigError, match="holds a run already; name another run folder"):
        create_run_folder(path, {"seed": 2})
    assert read_json(folder.config_json) == {"seed": 1}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        create_run_folder(tmp_path / "file", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_too_little_space_or_an_impossible_place_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MiB free, a run needs \d+ MiB; make space there"):
        create_run_folder(tmp_path / "run", {}, min_free_bytes=2**62)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        create_run_folder(tmp_path / "file" / "run", {})
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_opening_what_is_no_run_folder_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run folder"):
        open_run_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a run folder \(no run\.db"):
        open_run_folder(tmp_path)


def test_metrics_are_one_json_object_a_line_and_a_nan_is_null(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "run", {})
    folder.append_metrics({"step": 1, "loss": 0.5})
    folder.append_metrics({"step": 2, "loss": float("nan")})
    lines = folder.metrics_jsonl.read_text().splitlines()
    assert lines == ['{"step":1,"loss":0.5}', '{"step":2,"loss":null}']
    folder.write_summary({"seed": 1})
    folder.write_summary({"seed": 2})
    assert read_json(folder.summary_json) == {"seed": 2}


def save(checkpoints: Checkpoints, step: int) -> None:
    folder = checkpoints.begin(step)
    (folder / "weights.safetensors").write_bytes(bytes([step]) * 1000)
    checkpoints.commit(step, version=step + 1)


def test_a_checkpoint_exists_only_once_it_is_committed_and_lists_its_files(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.begin(4) / "left.over").write_bytes(b"torn")
    assert checkpoints.steps() == []
    save(checkpoints, 4)
    assert checkpoints.steps() == [4]
    manifest = checkpoints.check(4)
    assert (manifest.step, manifest.version) == (4, 5)
    assert [(one.name, one.num_bytes) for one in manifest.files] == [("weights.safetensors", 1000)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-4"]


def test_a_changed_or_missing_file_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 0)
    file = checkpoints.path(0) / "weights.safetensors"
    file.write_bytes(bytes([0]) * 999)
    with pytest.raises(BoundaryError, match="differs from its manifest"):
        checkpoints.check(0)
    file.unlink()
    with pytest.raises(BoundaryError, match="No such file"):
        checkpoints.check(0)
    (checkpoints.path(0) / MANIFEST).write_bytes(b'{"step":')
    with pytest.raises(BoundaryError, match="truncated"):
        checkpoints.check(0)


def test_an_empty_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin(1)
    with pytest.raises(BoundaryError, match="holds no file"):
        checkpoints.commit(1, version=1)
    with pytest.raises(BoundaryError, match="No such file"):
        checkpoints.commit(2, version=1)


def test_a_replacement_that_a_crash_cut_in_half_leaves_the_acknowledged_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 2)
    save(checkpoints, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["step-2"]
    (tmp_path / "step-2").rename(tmp_path / ".step-2.replaced")
    Checkpoints(tmp_path).recover()
    assert checkpoints.check(2).version == 3
    assert [one.name for one in tmp_path.iterdir()] == ["step-2"]


def test_retention_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 3, 5, 7, 11):
        save(checkpoints, step)
    assert checkpoints.retain(2, protect=frozenset({1})) == [3, 5]
    assert checkpoints.steps() == [1, 7, 11]
    assert checkpoints.retain(0) == [1, 7]
    assert checkpoints.steps() == [11]
