"""How each agent program is started: its arguments, its environment, where its text lies.

Owns argv and env of the profiles. Must not know the sandbox or what the agent does.
Invariants: the key travels in the environment unless the user's own command asks for it; the
program sees only the instruction, its endpoint and its folders.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import HarnessJob, LaunchSpec

GYRE_AGENT = Path(__file__).with_name("gyre_agent.py").resolve()
INSTRUCTION_FILE = "instruction.md"
DEFAULT_PORTS = {"http": 80, "https": 443}
PLACEHOLDERS = ("instruction", "instruction_file", "base_url", "api_key", "model", "workspace")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def stage_agent(folder: Path) -> Path:
    """Copy the bundled agent below `folder`, where launches under another user id can read it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    program = folder / GYRE_AGENT.name
    shutil.copyfile(GYRE_AGENT, program)
    program.chmod(0o644)
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class GyreAgent:
    """The bundled agent at `program`, run by `python`, which needs `python_paths` readable;
    `arguments` are added to its command line."""

    program: Path
    python: Path
    python_paths: tuple[Path, ...] = ()
    arguments: tuple[str, ...] = ()
    name: str = "gyre-agent"

    def prepare(self, job: HarnessJob) -> LaunchSpec:
        instruction = _write_instruction(job)
        argv = (
            *(str(self.python), "-I", "-S", str(self.program)),
            *("--instruction-file", instruction),
            *self.arguments,
        )
        return _spec(job, argv, read_only_paths=(self.program, *self.python_paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any program. `argv` may hold {instruction} {instruction_file} {base_url} {api_key} {model}
    {workspace}; other braces stay as they are. `env` is added to the OPENAI_* variables."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    read_only_paths: tuple[Path, ...] = ()
    name: str = "command"

    def prepare(self, job: HarnessJob) -> LaunchSpec:
        values = {
            "instruction": job.instruction,
            "instruction_file": _write_instruction(job),
            "base_url": job.base_url,
            "api_key": job.api_key,
            "model": job.model,
            "workspace": str(job.workspace),
        }
        argv = tuple(_fill(part, values) for part in self.argv)
        env = {name: _fill(value, values) for name, value in self.env}
        return _spec(job, argv, read_only_paths=self.read_only_paths, env=env)


def check_command(argv: tuple[str, ...]) -> None:
    """Raises ConfigError for a command that could not be filled in."""
    if not argv or not argv[0]:
        raise ConfigError("harness.argv is empty: expected a program and its arguments")
    for part in argv:
        for name in _PLACEHOLDER.findall(part):
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                raise ConfigError(f"harness.argv names {{{name}}}: expected one of {known}")


def _fill(part: str, values: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), part)


def _write_instruction(job: HarnessJob) -> str:
    path = job.private_tmp / INSTRUCTION_FILE
    path.write_text(job.instruction)
    return str(path)


def _spec(
    job: HarnessJob,
    argv: tuple[str, ...],
    *,
    read_only_paths: tuple[Path, ...],
    env: dict[str, str] | None = None,
) -> LaunchSpec:
    endpoint = urlsplit(job.base_url)
    return LaunchSpec(
        execution=job.execution,
        argv=argv,
        workspace=job.workspace,
        private_tmp=job.private_tmp,
        env={
            "OPENAI_BASE_URL": job.base_url,
            "OPENAI_API_KEY": job.api_key,
            "OPENAI_MODEL": job.model,
            **(env or {}),
        },
        read_only_paths=read_only_paths,
        gateway_port=endpoint.port or DEFAULT_PORTS.get(endpoint.scheme),
        limits=job.limits,
    )
