"""An agent that was not made for OpenGyre: the openai-agents library with one tool.

Installed by checks/harnesses.sh as the program `unlisted-agent`; it knows no more than what every
client of OpenAI's libraries does.
"""

import os
import subprocess
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def shell(command: str) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


set_tracing_disabled(True)
agent = Agent(
    name="unlisted",
    instructions="Do what you are asked with the shell.",
    model=os.environ["OPENAI_MODEL"],
    tools=[shell],
)
Runner.run_sync(agent, Path(sys.argv[1]).read_text(encoding="utf-8"), max_turns=30)
