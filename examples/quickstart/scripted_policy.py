"""The scripted engine's player: from a conversation's text to the next agent turn.

Owns reading the Qwen3 chat text back into commands and outputs. Its answer depends on the text,
the seed and the mistake rate only: the same text always gets the same answer, wherever and
however often it is asked. It must not import torch.
"""

from __future__ import annotations

import json
import random
import re
import zlib

from demonstrator import DONE, NOISY, Dice, Exchange, next_command

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def respond(conversation_text: str, seed: int, *, mistake_rate: float = 0.0) -> str:
    """The next agent turn, without the end-of-turn marker: a tool call, or `done`.

    `conversation_text` is the decoded prompt with its markers, ending where the agent is to write.
    `mistake_rate` 0 plays perfectly, 1 makes the mistakes of the warm start's demonstrations.
    """
    instruction, history = read_conversation(conversation_text)
    random_seed = zlib.crc32(f"{seed}\n{conversation_text}".encode())
    dice = Dice(rng=random.Random(random_seed), mistakes=NOISY.scaled(mistake_rate))
    command = next_command(instruction, history, dice)
    if command is None:
        return DONE
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


def read_conversation(text: str) -> tuple[str, list[Exchange]]:
    """The first user message that is not a tool result, and every command with its output.

    A call that cannot be read counts as an empty command; a command without an output yet is
    left out.
    """
    instruction = ""
    commands: list[str] = []
    outputs: list[str] = []
    for role, body in TURN.findall(text):
        if role == "assistant":
            commands += [read_command(call) for call in CALL.findall(body)]
        elif role == "user":
            results = RESULT.findall(body)
            outputs += results
            if not results and not instruction:
                instruction = body
    pairs = zip(commands, outputs, strict=False)
    return instruction, [Exchange(command=command, output=output) for command, output in pairs]


def read_command(call: str) -> str:
    try:
        return str(json.loads(call)["arguments"]["command"])
    except (ValueError, KeyError, TypeError):
        return ""
