"""What programs send back of a call is not what was sampled; the recorded branch stays whole.

Claude Code sends arguments in the schema's key order, qwen-code compact ones with escapes decoded
and trimmed thinking, Codex and mini-swe-agent the string as it was (HARNESSES.md section 1).
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from drawn_pairs import PROGRAMS
from program_rig import Scene, profile_of

from opengyre.runtime.trying.solver import CALL, SUBMIT, TURN, shell_tool

pytestmark = pytest.mark.timeout(200)

NUM_CALLS = 20
OPTIONAL = {"timeout": 5000.0, "description": "née"}
"""Sent where the tool knows them; Codex refuses a whole number written with a point."""


@dataclass(frozen=True, slots=True)
class OddWriter:
    """Reversed keys, blanks, escapes, numbers with a point, trailing blanks and newlines."""

    num_calls: int

    def respond(self, conversation: str, seed: int) -> str:
        turns = TURN.findall(conversation)
        num_done = sum(CALL in body for role, body in turns if role == "assistant")
        tool = shell_tool(conversation)
        thought = f"<think>\nThe thought number {num_done}.  \n\n\n</think>\n\n"
        if tool is None or num_done > self.num_calls - (SUBMIT not in conversation):
            return f"{thought}All is done.  "
        command = f'printf "%s\\n" "é {num_done}"  >>  out'
        if num_done == self.num_calls:
            command = f"echo {SUBMIT}"
        arguments = tool.arguments_for(command)
        arguments |= {key: value for key, value in OPTIONAL.items() if key in tool.properties}
        call = odd(tool.name, arguments)
        return f"{thought}Text with blanks after it.   \n\n{CALL}{call}\n</tool_call>"


def odd(name: str, arguments: dict[str, Any]) -> str:
    reversed_keys = dict(reversed(arguments.items()))
    body = json.dumps(reversed_keys, separators=(" ,  ", " :   "), ensure_ascii=True)
    return f'{{"name": "{name}", "arguments": {body}}}'


@pytest.mark.parametrize("name", PROGRAMS)
def test_case_2_twenty_oddly_written_calls_stay_on_one_branch(name: str) -> None:
    run = Scene(profile_of(name), respond=OddWriter(NUM_CALLS).respond).run()
    run.check_ended_well()
    assert run.files["out"] == "".join(f"é {number}\n" for number in range(NUM_CALLS))
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    assert len(run.committed) == len(run.calls) == NUM_CALLS + 1
