"""How instructions, endpoints and folders become a launch."""

from dataclasses import replace
from pathlib import Path

import pytest

from opengyre.harness.profiles import Command, GyreAgent, check_command, stage_agent
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import HarnessJob, Limits


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


def test_the_bundled_agent_gets_its_text_as_a_file_and_its_key_as_environment(
    job: HarnessJob, tmp_path: Path
) -> None:
    program = stage_agent(tmp_path / "agent")
    agent = GyreAgent(program=program, python=Path("/usr/bin/python3"))
    spec = agent.prepare(job)
    assert spec.argv[:4] == ("/usr/bin/python3", "-I", "-S", str(program))
    assert Path(spec.argv[-1]).read_text() == job.instruction
    assert job.api_key not in " ".join(spec.argv)
    assert spec.env["OPENAI_API_KEY"] == job.api_key
    assert spec.env["OPENAI_BASE_URL"] == job.base_url
    assert spec.gateway_port == 8123
    assert spec.limits.wall_s == 12.0
    assert program in spec.read_only_paths


def test_a_command_is_filled_in_once_and_never_from_the_instruction(job: HarnessJob) -> None:
    argv = ("/usr/bin/agent", "--task={instruction}", "{workspace}/x", "{instruction_file}", "{}")
    spec = Command(argv=argv, env=(("KEY", "{api_key}"), ("NOTE", "a{b}c"))).prepare(job)
    assert spec.argv[1] == f"--task={job.instruction}"
    assert spec.argv[2] == f"{job.workspace}/x"
    assert Path(spec.argv[3]).read_text() == job.instruction
    assert spec.argv[4] == "{}"
    assert spec.env["KEY"] == job.api_key
    assert spec.env["NOTE"] == "a{b}c"


def test_a_url_with_a_scheme_but_no_port_gets_the_port_of_its_scheme(job: HarnessJob) -> None:
    spec = Command(argv=("/bin/true",)).prepare(replace(job, base_url="http://gateway/v1"))
    assert spec.gateway_port == 80


@pytest.mark.parametrize(
    ("argv", "words"), [((), "empty"), (("",), "empty"), (("a", "{modle}"), "{modle}")]
)
def test_a_command_that_cannot_be_filled_in_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_command(argv)
