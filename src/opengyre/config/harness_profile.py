"""A harness profile: how one agent program is launched, and how its calls are told apart.

Owns: the keys of a profile file, its templates' names, reading it by shipped name or by path. Must
not know: sandboxes, HTTP. Invariants: an unknown key or placeholder is refused with its name; a
file that a profile writes lies below the launch's own home.
"""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from opengyre.config.base import PROFILES, SHIPPED_HARNESSES, Regex, Section
from opengyre.config.load import read_toml
from opengyre.config.words import problem_lines
from opengyre.seams.errors import ConfigError

PLACEHOLDERS = {
    "instruction": "the task's text",
    "instruction_file": "a file that holds it",
    "base_url": "the execution's endpoint, ending in /v1",
    "base_url_root": "the same without /v1",
    "api_key": "the execution's key",
    "model": "the model's name",
    "workspace": "the folder it works in",
    "home": "its own empty home",
    "program": "the program that was found",
    "python": "a Python that agents can run",
    "gyre_agent": "the bundled agent's file",
    "max_turns": "harness.max_turns",
    "max_new_tokens": "sampling.max_new_tokens",
    "context_tokens": "sampling.context_tokens",
    "half_context_tokens": "half of it",
}
PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
"""`${NAME}` belongs to a shell, and other braces stay as they are."""


def template_problem(text: str) -> str:
    """Words about the first unknown placeholder in `text`; "" if all is well."""
    for name in PLACEHOLDER.findall(text):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            return f"expected one of {known}; {{{name}}} is none of them"
    return ""


def _checked_template(text: str) -> str:
    if problem := template_problem(text):
        raise ValueError(problem)
    return text


def _checked_home_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
        raise ValueError("expected a path below the home, such as .codex/config.toml")
    return path


def _checked_system_path(path: str) -> str:
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise ValueError("expected an absolute path")
    return path


Template = Annotated[str, AfterValidator(_checked_template)]
SystemPath = Annotated[str, AfterValidator(_checked_system_path)]
HomePath = Annotated[str, AfterValidator(_checked_home_path)]
ProgramName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]


class HomeFile(Section):
    """One `[[launch.files]]` table: a file that the program reads."""

    path: HomePath = Field(description="where it lies below the home")
    text: Template = Field(description="what it holds")


class Launch(Section):
    """`[launch]`: the program, its command line, its environment, its files."""

    program: ProgramName | None = Field(
        default=None, description="name looked up in .harnesses and on the PATH, for {program}"
    )
    needs: tuple[ProgramName, ...] = Field(
        default=(), description="other programs it starts, put on its PATH"
    )
    readable: tuple[SystemPath, ...] = Field(
        default=(), description="what else it must read, as absolute paths; /proc/self is its own"
    )
    argv: tuple[Template, ...] = Field(default=(), description="command line")
    env: dict[str, Template] = Field(default={}, description="added to the OPENAI_* variables")
    files: tuple[HomeFile, ...] = Field(default=(), description="written below a fresh home")


class LabelCondition(Section):
    """One piece of wire evidence: `header`, `field` or `text`, present and not empty unless
    `matches` or `is_empty` says otherwise."""

    header: str | None = Field(default=None, min_length=1, description="name of a request header")
    field: str | None = Field(default=None, min_length=1, description="dotted path in the body")
    text: Literal["system", "last_user"] | None = Field(
        default=None, description="all system text, or the text of the last user message"
    )
    matches: Regex | None = Field(default=None, description="found anywhere in the value")
    is_empty: bool | None = Field(
        default=None, description='absent, null, "" and [] are empty, all else is not'
    )

    @model_validator(mode="after")
    def _is_one_test(self) -> Self:
        if sum(one is not None for one in (self.header, self.field, self.text)) != 1:
            raise ValueError("expected exactly one of header, field, text")
        if self.matches is not None and self.is_empty is not None:
            raise ValueError("expected at most one of matches, is_empty")
        return self


class LabelRule(Section):
    """One `[[labels]]` table; the first whose conditions all hold names the call's role."""

    role: Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "side"] = Field(
        description="role of the call"
    )
    all: tuple[LabelCondition, ...] = Field(min_length=1, description="conditions that must hold")


class HarnessProfile(Section):
    """A whole profile file. A call that no rule labels is `main`."""

    name: str = Field(min_length=1, description="name; the file's, unless it says another")
    about: str = Field(default="", description="one line for a person")
    install: str = Field(default="", description="how to install the program, in words")
    launch: Launch = Field(default=Launch(), description="how it is started")
    labels: tuple[LabelRule, ...] = Field(default=(), description="how its calls are told apart")

    @model_validator(mode="after")
    def _has_program(self) -> Self:
        texts = (*self.launch.argv, *self.launch.env.values())
        if self.launch.program is None and any("{program}" in text for text in texts):
            raise ValueError("expected launch.program beside {program}")
        return self


def load_profile(name: str) -> HarnessProfile:
    """A shipped profile by its name, or a user's own by its path. Raises ConfigError."""
    is_file = name.endswith(".toml")
    if not is_file and name not in SHIPPED_HARNESSES:
        known = ", ".join(SHIPPED_HARNESSES)
        raise ConfigError(f"{name}: no such harness; expected one of {known}, or a .toml file")
    path = Path(name) if is_file else PROFILES / f"{name}.toml"
    table = read_toml(path)
    table.setdefault("name", path.stem)
    try:
        return HarnessProfile.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        lines = problem_lines(error.errors(include_url=False), HarnessProfile)
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from error
