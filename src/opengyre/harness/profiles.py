"""From a profile and a job to a launch: arguments, environment, files.

Owns: filling in templates, and the launch's home. Must not know: the sandbox or what the agent
does. Invariants: the key travels in the environment or in a file of mode 600 unless the user's own
command asks for it; the program sees only the instruction, its endpoint and its folders; values
are filled in once, so nothing in an instruction is ever a placeholder.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opengyre.config.harness_profile import PLACEHOLDER, HarnessProfile, template_problem
from opengyre.harness.programs import Program
from opengyre.harness.sandbox import PROGRAM_PATH
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import HarnessJob, LaunchSpec

GYRE_AGENT = Path(__file__).with_name("gyre_agent.py").resolve()
COMMAND = "command"
"""The shipped profile without a command line: the user's own stands for it."""
INSTRUCTION_FILE = "instruction.md"
HOME_FOLDER, TEMPORARY_FOLDER = "home", "tmp"
DEFAULT_PORTS = {"http": 80, "https": 443}


def stage_agent(folder: Path) -> Path:
    """Copy the bundled agent below `folder`, where launches under another user id can read it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    program = folder / GYRE_AGENT.name
    shutil.copyfile(GYRE_AGENT, program)
    program.chmod(0o644)
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileHarness:
    """Launches what `profile` describes. `values` fill its templates beside those of a job;
    `argv` stands for the profile's if it is not empty."""

    profile: HarnessProfile
    values: Mapping[str, str]
    argv: tuple[str, ...] = ()
    bins: tuple[Path, ...] = ()
    read_only_paths: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return self.profile.name

    def prepare(self, job: HarnessJob) -> LaunchSpec:
        home, temporary = (job.private_tmp / one for one in (HOME_FOLDER, TEMPORARY_FOLDER))
        home.mkdir()
        temporary.mkdir()
        values = {**self.values, **_job_values(job, home)}
        launch = self.profile.launch
        for file in launch.files:
            _write_private(home / file.path, _fill(file.text, values))
        endpoint = urlsplit(job.base_url)
        return LaunchSpec(
            execution=job.execution,
            argv=tuple(_fill(part, values) for part in self.argv or launch.argv),
            workspace=job.workspace,
            private_tmp=job.private_tmp,
            env={
                "HOME": str(home),
                "TMPDIR": str(temporary),
                "PATH": ":".join((*map(str, self.bins), PROGRAM_PATH)),
                "OPENAI_BASE_URL": job.base_url,
                "OPENAI_API_KEY": job.api_key,
                "OPENAI_MODEL": job.model,
                **{name: _fill(value, values) for name, value in launch.env.items()},
            },
            read_only_paths=self.read_only_paths,
            gateway_port=endpoint.port or DEFAULT_PORTS.get(endpoint.scheme),
            limits=job.limits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What the machine gives to every launch: a Python with what it needs readable, and the
    bundled agent."""

    python: Path
    python_paths: tuple[Path, ...]
    gyre_agent: Path


def open_harness(
    profile: HarnessProfile,
    program: Program | None,
    *,
    staged: Staged,
    settings: Mapping[str, str],
    command: tuple[str, ...] = (),
) -> ProfileHarness:
    """A harness from its parts; `settings` are the config's values for templates, `command` the
    user's own command line (checked by `check_launch`)."""
    values = {
        **settings,
        "half_context_tokens": str(int(settings["context_tokens"]) // 2),
        "python": str(staged.python),
        "gyre_agent": str(staged.gyre_agent),
        "program": "" if program is None else str(program.path),
    }
    return ProfileHarness(
        profile=profile,
        values=values,
        argv=command,
        bins=() if program is None else program.bins,
        read_only_paths=(
            *(() if program is None else program.read_only_paths),
            *_readable(staged, (*profile.launch.argv, *command)),
            *map(Path, profile.launch.readable),
        ),
    )


def check_launch(profile: HarnessProfile, command: tuple[str, ...]) -> None:
    """Raises ConfigError if there is no command line, or one that cannot be filled in."""
    if profile.launch.argv:
        if command:
            raise ConfigError(f"{profile.name} has a command line of its own: leave COMMAND out")
        return
    if profile.name != COMMAND:
        raise ConfigError(f"{profile.name}: launch.argv is empty: expected a command line")
    if not command or not command[0]:
        raise ConfigError("harness.command is empty: expected a program and its arguments")
    for part in command:
        if problem := template_problem(part):
            raise ConfigError(f"harness.command = {part}: {problem}")


def _readable(staged: Staged, argv: tuple[str, ...]) -> tuple[Path, ...]:
    """Only what the command line names."""
    text = " ".join(argv)
    python_paths = staged.python_paths if "{python}" in text else ()
    return (*((staged.gyre_agent,) if "{gyre_agent}" in text else ()), *python_paths)


def _job_values(job: HarnessJob, home: Path) -> dict[str, str]:
    instruction_file = job.private_tmp / INSTRUCTION_FILE
    instruction_file.write_text(job.instruction)
    return {
        "instruction": job.instruction,
        "instruction_file": str(instruction_file),
        "base_url": job.base_url,
        "base_url_root": job.base_url.removesuffix("/v1"),
        "api_key": job.api_key,
        "model": job.model,
        "workspace": str(job.workspace),
        "home": str(home),
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
