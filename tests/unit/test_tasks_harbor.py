"""Task folders: what is read, and the one clear line for each way they can be wrong."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opengyre.seams.errors import ConfigError
from opengyre.seams.tasks import GraderKind
from opengyre.tasks.harbor import load_task, load_tasks
from opengyre.tasks.workspaces import (
    WorkspaceError,
    copy_workspace,
    lay_out_workspace,
    remove_tree,
)


def make_task(folder: Path, *, instruction: str = "Sum the files.", settings: str = "") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment" / "workspace" / "log").mkdir(parents=True)
    (folder / "task.toml").write_text(settings)
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text("echo 1 > $GYRE_VERIFIER_DIR/reward.txt\n")
    (folder / "environment" / "workspace" / "log" / "7").write_text("sum 58 end\n")
    return folder


def test_a_task_is_read_with_its_text_its_budgets_and_its_workspace(tmp_path: Path) -> None:
    settings = 'version = "1.0"\n[agent]\ntimeout_sec = 90\n[verifier]\ntimeout_sec = 4.5\n'
    task = load_task(make_task(tmp_path / "trail-1", settings=settings))
    assert task.name == "trail-1"
    assert task.instruction == "Sum the files."
    assert (task.agent_wall_s, task.grader_wall_s) == (90.0, 4.5)
    lay_out_workspace(task, tmp_path / "run" / "workspace")
    assert (tmp_path / "run" / "workspace" / "log" / "7").read_text() == "sum 58 end\n"


def test_a_task_without_budgets_or_workspace_is_a_task(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "bare")
    remove_tree(folder / "environment")
    task = load_task(folder)
    assert task.workspace is None
    assert (task.agent_wall_s, task.grader_wall_s) == (None, None)
    lay_out_workspace(task, tmp_path / "workspace")
    assert list((tmp_path / "workspace").iterdir()) == []


def test_a_folder_may_be_one_task_or_hold_many_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_task(tmp_path / "set" / name)
    (tmp_path / "set" / ".git").mkdir()
    (tmp_path / "set" / "README.md").write_text("a set")
    assert [task.name for task in load_tasks(tmp_path / "set")] == ["a", "b", "c"]
    assert [task.name for task in load_tasks(tmp_path / "set" / "b")] == ["b"]


def test_content_and_not_the_name_makes_the_hash(tmp_path: Path) -> None:
    first = load_task(make_task(tmp_path / "one"))
    assert load_task(make_task(tmp_path / "two")).content_hash == first.content_hash
    other = make_task(tmp_path / "three")
    (other / "environment" / "workspace" / "log" / "7").write_text("sum 59 end\n")
    assert load_task(other).content_hash != first.content_hash
    moved = make_task(tmp_path / "four")
    (moved / "environment" / "workspace" / "log" / "7").rename(moved / "environment/workspace/7")
    assert load_task(moved).content_hash != first.content_hash


def break_link_to_host(folder: Path) -> None:
    (folder / "environment/workspace/leak").symlink_to("/etc/passwd")


def break_link_upwards(folder: Path) -> None:
    (folder / "environment/workspace/log/leak").symlink_to("../../../../other")


def break_workspace_link(folder: Path) -> None:
    remove_tree(folder / "environment" / "workspace")
    (folder / "environment" / "workspace").symlink_to("/etc")


def break_pipe(folder: Path) -> None:
    os.mkfifo(folder / "tests" / "pipe")


def break_instruction_link(folder: Path) -> None:
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to("/etc/hostname")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda folder: (folder / "task.toml").unlink(), "task.toml is missing"),
    "no text": (lambda folder: (folder / "instruction.md").unlink(), "instruction.md is missing"),
    "no tests": (lambda folder: remove_tree(folder / "tests"), "tests/test.sh is missing"),
    "empty text": (lambda folder: (folder / "instruction.md").write_text(" \n"), "is empty"),
    "not text": (lambda folder: (folder / "instruction.md").write_bytes(b"\xff"), "UTF-8"),
    "not TOML": (lambda folder: (folder / "task.toml").write_text("[agent"), "expected TOML"),
    "no seconds": (
        lambda folder: (folder / "task.toml").write_text("[agent]\ntimeout_sec = true"),
        "agent.timeout_sec is True; expected seconds above 0",
    ),
    "no time": (
        lambda folder: (folder / "task.toml").write_text("[verifier]\ntimeout_sec = nan"),
        "verifier.timeout_sec is nan",
    ),
    "link to the host": (break_link_to_host, "leads to /etc/passwd"),
    "link upwards": (break_link_upwards, "outside of its folder"),
    "linked workspace": (break_workspace_link, "leads outside of its task"),
    "linked instruction": (break_instruction_link, "instruction.md is a link"),
    "pipe": (break_pipe, "expected files, folders and links only"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused_in_one_line_that_names_it(tmp_path: Path, kind: str) -> None:
    folder = make_task(tmp_path / "set" / "trail-9")
    damage, words = BROKEN[kind]
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path / "set")
    assert words in str(caught.value)
    assert "trail-9" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_tasks(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no task"):
        load_tasks(tmp_path)


def test_a_set_member_that_is_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "elsewhere" / "one")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "one").symlink_to(tmp_path / "elsewhere" / "one")
    with pytest.raises(ConfigError, match="leads outside of"):
        load_tasks(tmp_path / "set")


def test_a_link_inside_the_workspace_is_kept_as_a_link(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "one")
    (folder / "environment/workspace/latest").symlink_to("log/7")
    lay_out_workspace(load_task(folder), tmp_path / "workspace")
    assert os.readlink(tmp_path / "workspace" / "latest") == "log/7"


def test_a_copy_keeps_links_and_leaves_pipes_out(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "leak").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "from" / "pipe")
    copy_workspace(tmp_path / "from", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["leak"]
    assert (tmp_path / "to" / "leak").is_symlink()


def test_a_sparse_giant_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    with open(tmp_path / "from" / "giant", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WorkspaceError, match="more than"):
        copy_workspace(tmp_path / "from", tmp_path / "to")


@pytest.mark.parametrize("names", [["deeper"] * 600, [*["l" * 250] * 20, *["b"] * 1100]])
def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path, names: list[str]) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises((WorkspaceError, OSError)):
        copy_workspace(tmp_path, tmp_path.with_name("copy"))
    remove_tree(tmp_path.with_name("copy"))
    remove_tree(tmp_path / names[0])
    assert not (tmp_path / names[0]).exists()


@pytest.mark.parametrize("kind", [GraderKind.COMMAND, GraderKind.CALLABLE])
def test_a_grader_that_needs_no_tests_takes_a_task_without(
    tmp_path: Path, kind: GraderKind
) -> None:
    folder = make_task(tmp_path / "bare")
    remove_tree(folder / "tests")
    assert not load_task(folder, kind=kind).tests.exists()
    (folder / "tests").write_text("a file")
    with pytest.raises(ConfigError, match="tests: expected a folder"):
        load_task(folder, kind=kind)


def test_the_pytest_grader_needs_a_test_file_and_no_script(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "set" / "one")
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path / "set", kind=GraderKind.PYTEST)
    assert str(folder) in str(caught.value)
    assert "no test_*.py or *_test.py below tests; add the tests" in str(caught.value)
    (folder / "tests" / "test.sh").unlink()
    (folder / "tests" / "deep").mkdir()
    (folder / "tests" / "deep" / "sum_test.py").write_text("def test_it(): pass\n")
    assert load_tasks(tmp_path / "set", kind=GraderKind.PYTEST)[0].name == "one"
