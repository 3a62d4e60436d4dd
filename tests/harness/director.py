"""A policy that plays a part for each kind of call: main branch, sub-agent, summary."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opengyre.runtime.trying.solver import CALL, TURN, offered_tools, shell_tool

AGENT_TOOLS = ("Agent", "Task", "agent", "spawn_agent")
SUB_PROMPT = "Write the word sub into the file out."
SUMMARY = "SUMMARY OF ALL SO FAR"
SUMMARY_REQUESTS = (
    "Your task is to create a detailed summary",
    "CONTEXT CHECKPOINT COMPACTION",
    "state_snapshot",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A call of the tool called one of `names`, in any namespace; without names, of a shell."""

    arguments: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    command: str = ""


def shell(command: str) -> Step:
    return Step(command=command)


SUB_AGENT = Step(
    arguments={
        "prompt": SUB_PROMPT,
        "message": SUB_PROMPT,
        "description": "write a word",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
    names=AGENT_TOOLS,
)
"""Starts a sub-agent, whatever the tool for it is called; it gets the arguments it knows."""
WAIT = Step(names=("wait_agent",))
"""Waits for the sub-agents that were started and are not yet known to have ended."""
AGENT_ID = re.compile(r'\\?"agent_id\\?":\s*\\?"([^"\\]+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Director:
    """`main` are the steps of the main branch, each tuple the calls of one turn; `after` those
    after a compaction; `sub` those of every sub-agent."""

    main: tuple[tuple[Step, ...], ...]
    sub: tuple[tuple[Step, ...], ...] = ()
    after: tuple[tuple[Step, ...], ...] = ()
    write: Callable[[dict[str, Any]], str] = json.dumps

    def respond(self, conversation: str, seed: int) -> str:
        turns = TURN.findall(conversation)
        last_user = next((body for role, body in reversed(turns) if role == "user"), "")
        system = next((body for role, body in turns if role == "system"), "")
        if any(words in last_user or words in system[:400] for words in SUMMARY_REQUESTS):
            return SUMMARY
        num_done = sum(CALL in body for role, body in turns if role == "assistant")
        steps = self._steps(conversation)
        if num_done >= len(steps):
            return "All is done."
        calls = [self._call(step, conversation) for step in steps[num_done]]
        return "\n".join(f"{CALL}{self.write(call)}\n</tool_call>" for call in calls)

    def _steps(self, conversation: str) -> Sequence[tuple[Step, ...]]:
        if not any(offered_tools(conversation)):
            return ()
        told = [body for role, body in TURN.findall(conversation) if role == "user"]
        if any(SUB_PROMPT in body for body in told if "<tool_response>" not in body):
            return self.sub
        return self.after if SUMMARY in conversation else self.main

    def _call(self, step: Step, conversation: str) -> dict[str, Any]:
        if not step.names:
            tool = shell_tool(conversation)
            assert tool is not None
            return {"name": tool.name, "arguments": tool.arguments_for(step.command)}
        offered = {str(one.get("name")): one for one in offered_tools(conversation)}
        name = next(name for name in offered if name.rpartition("__")[2] in step.names)
        known = offered[name].get("parameters", {}).get("properties", {})
        arguments = {key: value for key, value in step.arguments.items() if key in known}
        if step is WAIT:
            started = dict.fromkeys(AGENT_ID.findall(conversation))
            ended = [one for one in started if f'{one}":{{"completed"' in conversation]
            arguments["targets"] = [one for one in started if one not in ended]
        return {"name": name, "arguments": arguments}
