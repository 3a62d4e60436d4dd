"""How instructions, endpoints and folders become a launch."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from opengyre.config.base import SHIPPED_HARNESSES
from opengyre.config.harness_profile import HarnessProfile, load_profile
from opengyre.harness.profiles import ProfileHarness, Staged, check_launch, open_harness
from opengyre.harness.programs import Program
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import HarnessJob, LaunchSpec, Limits

STAGED = Staged(
    python=Path("/usr/bin/python3"),
    python_paths=(Path("/opt/python"),),
    gyre_agent=Path("/srv/gyre_agent.py"),
)
SETTINGS = {"max_turns": "7", "max_new_tokens": "24", "context_tokens": "560"}


@pytest.fixture
def job(tmp_path: Path) -> HarnessJob:
    for name in ("workspace", "tmp"):
        (tmp_path / name).mkdir()
    return HarnessJob(
        execution="e000007",
        instruction="Write {model} and $HOME; quote 'this'.",
        workspace=tmp_path / "workspace",
        private_tmp=tmp_path / "tmp",
        base_url="http://127.0.0.1:8123/e000007/v1",
        api_key="sk-only-mine",
        model="policy",
        limits=Limits(wall_s=12.0),
    )


def opened(profile: HarnessProfile, command: tuple[str, ...] = ()) -> ProfileHarness:
    name = profile.launch.program
    program = None if name is None else Program(path=Path("/opt/bin", name))
    return open_harness(profile, program, staged=STAGED, settings=SETTINGS, command=command)


def launched(job: HarnessJob, *command: str) -> LaunchSpec:
    return opened(load_profile("command"), command).prepare(job)


def test_the_bundled_agent_gets_its_text_as_a_file_and_its_key_as_environment(
    job: HarnessJob,
) -> None:
    spec = opened(load_profile("gyre-agent")).prepare(job)
    assert spec.argv[:4] == ("/usr/bin/python3", "-I", "-S", "/srv/gyre_agent.py")
    assert Path(spec.argv[5]).read_text() == job.instruction
    assert spec.argv[6:] == (
        *("--max-turns", "7"),
        *("--max-output-tokens", "24"),
        *("--context-tokens", "560"),
    )
    assert spec.env["OPENAI_API_KEY"] == job.api_key

    assert spec.env["OPENAI_BASE_URL"] == job.base_url
    assert spec.gateway_port == 8123
    assert spec.limits.wall_s == 12.0
    assert set(spec.read_only_paths) == {STAGED.gyre_agent, *STAGED.python_paths}


@pytest.mark.parametrize("name", SHIPPED_HARNESSES)
def test_no_shipped_profile_puts_the_key_on_its_command_line(name: str, job: HarnessJob) -> None:
    spec = opened(load_profile(name), ("/bin/true",) if name == "command" else ()).prepare(job)
    assert job.api_key not in " ".join(spec.argv)
    assert job.api_key in spec.env.values()
    home = job.private_tmp / "home"
    assert spec.env["HOME"] == str(home)
    for path in home.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o777 == 0o600


def test_its_variants_differ_by_an_option(job: HarnessJob) -> None:
    plain = opened(load_profile("gyre-agent")).prepare(job)
    for name, more in {
        "gyre-agent-compact": ("--compact-at-tokens", "280"),
        "gyre-agent-sub-agent": ("--scout-turns", "4"),
    }.items():
        shutil.rmtree(job.private_tmp)
        job.private_tmp.mkdir()
        assert opened(load_profile(name)).prepare(job).argv == (*plain.argv, *more)


def test_a_file_of_a_profile_is_filled_in(job: HarnessJob) -> None:
    opened(load_profile("codex")).prepare(job)
    text = (job.private_tmp / "home" / ".codex" / "config.toml").read_text()
    assert f'base_url = "{job.base_url}"' in text
    assert job.api_key not in text


def test_a_command_is_filled_in_once_and_never_from_the_instruction(job: HarnessJob) -> None:
    spec = launched(
        job, "/usr/bin/agent", "--task={instruction}", "{workspace}/x", "{instruction_file}", "{}"
    )
    assert spec.argv[1] == f"--task={job.instruction}"
    assert spec.argv[2] == f"{job.workspace}/x"
    assert Path(spec.argv[3]).read_text() == job.instruction
    assert spec.argv[4] == "{}"


def test_braces_of_a_shell_stay_as_they_are(job: HarnessJob) -> None:
    script = "echo ${model} ${HOME} {model} {{x}}"
    assert launched(job, "/bin/sh", "-c", script).argv[2] == "echo ${model} ${HOME} policy {{x}}"


def test_the_programs_a_harness_needs_come_first_on_its_path(job: HarnessJob) -> None:
    program = Program(
        path=Path("/opt/bin/qwen"), bins=(Path("/opt/node/bin"),), read_only_paths=(Path("/opt/q"),)
    )
    harness = open_harness(load_profile("qwen-code"), program, staged=STAGED, settings=SETTINGS)
    spec = harness.prepare(job)
    assert "/opt/bin/qwen" in spec.argv
    assert spec.env["PATH"].split(":")[0] == "/opt/node/bin"
    assert spec.read_only_paths == (Path("/opt/q"),)


def test_a_url_with_a_scheme_but_no_port_gets_the_port_of_its_scheme(job: HarnessJob) -> None:
    spec = launched(replace(job, base_url="http://gateway/v1"), "/bin/true")
    assert spec.gateway_port == 80


@pytest.mark.parametrize(
    ("argv", "words"), [((), "empty"), (("",), "empty"), (("a", "{modle}"), "{modle}")]
)
def test_a_command_that_cannot_be_filled_in_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_launch(load_profile("command"), argv)


def test_a_command_beside_a_profiles_own_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="codex has a command line of its own"):
        check_launch(load_profile("codex"), ("/bin/true",))


def test_a_users_profile_without_a_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mine: launch\.argv is empty"):
        check_launch(HarnessProfile(name="mine"), ())
