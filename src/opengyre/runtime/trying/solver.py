"""A policy that solves a task by known commands, with whatever shell-like tool it is offered.

Owns: reading tools and history out of Qwen3 chat text, and writing tool calls in it. Must not
know: harnesses by name, engines. Invariant: its answer depends on the text alone, so a request
that is asked again or continued elsewhere gets the same words.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
CALL = "<tool_call>\n"
SHELL_WORDS = ("bash", "shell", "exec", "command", "terminal")
COMMAND_KEYS = ("command", "cmd", "script")
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What agents of the SWE-agent family say to end; others end by an answer without a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTool:
    """A tool that runs a command; `arguments_for` fills what its schema requires."""

    name: str
    key: str
    properties: dict[str, Any]
    required: tuple[str, ...]

    def arguments_for(self, command: str) -> dict[str, Any]:
        value: Any = command
        if self.properties[self.key].get("type") == "array":
            value = ["bash", "-lc", command]
        others = {
            name: _plain(self.properties.get(name, {}))
            for name in self.required
            if name != self.key
        }
        return {self.key: value, **others}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSolver:
    """Runs `commands` in order, one per turn, then says `last_words`. Before each call it thinks
    `thinking` and says `text`, if they are not empty. A conversation without a shell-like tool
    gets the last words."""

    commands: tuple[str, ...]
    thinking: str = ""
    text: str = ""
    last_words: str = "done"

    def respond(self, conversation: str, seed: int) -> str:
        """The next turn, without its end marker (see engines.scripted.text_policy)."""
        tool = shell_tool(conversation)
        turns = TURN.findall(conversation)
        num_done = sum(CALL in body for role, body in turns if role == "assistant")
        commands = self.commands
        if SUBMIT in conversation:
            commands = (*commands, f"echo {SUBMIT}")
        thought = f"<think>\n{self.thinking}\n</think>\n\n" if self.thinking else ""
        if tool is None or num_done >= len(commands):
            return thought + self.last_words
        call = {"name": tool.name, "arguments": tool.arguments_for(commands[num_done])}
        return f"{thought}{self.text}{CALL}{json.dumps(call)}\n</tool_call>"


def shell_tool(conversation: str) -> ShellTool | None:
    """The most shell-like tool that the prompt offers: one that takes a command."""
    tools = [tool for tool in map(_as_shell, offered_tools(conversation)) if tool is not None]
    return min(tools, key=_rank, default=None)


def offered_tools(conversation: str) -> Iterator[dict[str, Any]]:
    """The functions between <tools> and </tools>, one JSON object a line."""
    found = TOOLS.search(conversation)
    for line in found[1].splitlines() if found else ():
        try:
            tool = json.loads(line)
        except ValueError:
            continue
        if isinstance(tool, dict):
            yield tool.get("function", tool)


def _as_shell(function: dict[str, Any]) -> ShellTool | None:
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    key = next((key for key in COMMAND_KEYS if key in properties), None)
    if key is None:
        return None
    return ShellTool(
        name=str(function.get("name")),
        key=key,
        properties=properties,
        required=tuple(schema.get("required") or ()),
    )


def _rank(tool: ShellTool) -> int:
    name = tool.name.lower()
    return next((k for k, word in enumerate(SHELL_WORDS) if word in name), len(SHELL_WORDS))


def _plain(schema: dict[str, Any]) -> Any:
    """A harmless value of the type that a schema asks for."""
    if schema.get("enum"):
        return schema["enum"][0]
    plain = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    return plain.get(str(schema.get("type")), "the next step")
