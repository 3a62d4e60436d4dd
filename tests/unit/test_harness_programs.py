"""Where a program is looked for, and what becomes readable for it."""

from pathlib import Path

import pytest

from opengyre.config.harness_profile import HarnessProfile, Launch
from opengyre.harness.programs import find_program, install_roots
from opengyre.seams.errors import ConfigError


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def profile(needs: tuple[str, ...] = ()) -> HarnessProfile:
    launch = Launch(program="gyre-test-agent", needs=needs, argv=("{program}",))
    return HarnessProfile(name="mine", install="pip install it", launch=launch)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a PATH with one folder, `bin`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_what_make_harnesses_installed_comes_before_the_path_and_a_named_one_before_both(
    here: Path,
) -> None:
    on_path = executable(here / "bin" / "gyre-test-agent")
    found = find_program(profile())
    assert found is not None
    assert (found.path, found.read_only_paths, found.bins) == (on_path, (on_path,), ())
    installed = executable(here / ".harnesses" / "mini" / "bin" / "gyre-test-agent")
    found = find_program(profile())
    assert found is not None
    assert found.path == installed
    named = executable(here / "elsewhere" / "agent")
    found = find_program(profile(), named)
    assert found is not None
    assert found.path == named


def test_a_profile_without_a_program_needs_none() -> None:
    bare = HarnessProfile(name="mine")
    assert find_program(bare) is None
    with pytest.raises(ConfigError, match="/opt/x: mine starts no program"):
        find_program(bare, Path("/opt/x"))


def test_a_missing_program_is_a_line_that_says_how_to_install_it(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_program(profile())
    assert str(caught.value) == (
        "mine needs the program gyre-test-agent, which is not there: pip install it"
    )
    with pytest.raises(ConfigError, match=r"mine needs the program .*/x, which is not there"):
        find_program(profile(), here / "x")


def test_programs_that_it_needs_are_put_on_its_path_and_made_readable(here: Path) -> None:
    executable(here / "bin" / "gyre-test-agent")
    node = executable(here / "bin" / "gyre-test-node")
    found = find_program(profile(needs=("gyre-test-node",)))
    assert found is not None
    assert found.bins == (here / "bin",)
    assert node in found.read_only_paths
    with pytest.raises(ConfigError, match="mine needs gyre-test-other on the PATH"):
        find_program(profile(needs=("gyre-test-other",)))


def test_an_npm_program_reads_its_whole_tree_and_nothing_beside_it(tmp_path: Path) -> None:
    script = executable(tmp_path / "node_modules" / "@a" / "b" / "cli.js")
    link = tmp_path / "node_modules" / ".bin" / "b"
    link.parent.mkdir()
    link.symlink_to(script)
    assert install_roots(link) == (tmp_path / "node_modules",)


def test_a_virtual_environment_is_read_with_the_base_it_was_made_from(tmp_path: Path) -> None:
    program = executable(tmp_path / "venv" / "bin" / "agent")
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {tmp_path}/python/bin\n")
    assert install_roots(program) == (tmp_path / "venv", tmp_path / "python")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert install_roots(program) == (tmp_path / "venv",)


def test_a_program_in_a_folder_of_programs_is_read_alone(tmp_path: Path) -> None:
    program = executable(tmp_path / ".local" / "bin" / "agent")
    assert install_roots(program) == (program,)
    assert install_roots(Path("/usr/bin/env")) == ()
