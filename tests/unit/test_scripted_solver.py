"""The policy that uses whatever shell-like tool a prompt offers."""

import json
from typing import Any

from opengyre.runtime.trying.solver import ScriptedSolver, shell_tool


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def prompt(*tools: dict[str, Any], num_done: int = 0, user: str = "Do it.") -> str:
    offered = "\n".join(json.dumps(one) for one in tools)
    head = f"<|im_start|>system\n# Tools\n<tools>\n{offered}\n</tools><|im_end|>\n"
    done = "<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n" * num_done
    return f"{head}<|im_start|>user\n{user}<|im_end|>\n{done}<|im_start|>assistant\n"


def call_in(answer: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    return found


STRING = {"type": "string"}
BASH = tool(
    "Bash",
    ("command", "timeout", "quiet", "kind"),
    **{
        "command": STRING,
        "timeout": {"type": "number"},
        "quiet": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "description": STRING,
    },
)
SOLVER = ScriptedSolver(commands=("ls", "make"))


def test_it_fills_in_what_a_tools_schema_requires_and_no_more() -> None:
    call = call_in(SOLVER.respond(prompt(BASH), 0))
    assert call["name"] == "Bash"
    assert call["arguments"] == {"command": "ls", "timeout": 60, "quiet": False, "kind": "a"}


def test_it_prefers_the_most_shell_like_of_the_tools_that_take_a_command() -> None:
    tools = (tool("run_command", command=STRING), tool("edit", path=STRING), BASH)
    found = shell_tool(prompt(*tools))
    assert found is not None
    assert found.name == "Bash"
    assert call_in(SOLVER.respond(prompt(tool("exec_command", cmd=STRING)), 0)) == {
        "name": "exec_command",
        "arguments": {"cmd": "ls"},
    }


def test_a_command_that_is_a_list_gets_a_shell() -> None:
    listed = tool("shell", command={"type": "array"})
    arguments = call_in(SOLVER.respond(prompt(listed), 0))["arguments"]
    assert arguments == {"command": ["bash", "-lc", "ls"]}


def test_one_command_a_turn_and_then_the_last_words() -> None:
    assert call_in(SOLVER.respond(prompt(BASH, num_done=1), 0))["arguments"]["command"] == "make"
    assert SOLVER.respond(prompt(BASH, num_done=2), 0) == "done"


def test_without_a_shell_it_only_speaks() -> None:
    assert shell_tool(prompt(tool("edit", path=STRING))) is None
    assert SOLVER.respond(prompt(tool("edit", path=STRING)), 0) == "done"
    assert (
        SOLVER.respond("<|im_start|>user\nTitle?<|im_end|>\n<|im_start|>assistant\n", 0) == "done"
    )


def test_an_agent_that_ends_by_a_command_gets_that_command() -> None:
    user = "End with `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."
    call = call_in(SOLVER.respond(prompt(BASH, num_done=2, user=user), 0))
    assert call["arguments"]["command"] == "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    assert SOLVER.respond(prompt(BASH, num_done=3, user=user), 0) == "done"
