"""Settings of the verdict: `[grading]`.

Owns: keys, defaults, bounds, and which kind needs which key. Must not know: how a grader asks.
"""

from typing import Annotated, Literal

from pydantic import Field

from opengyre.config.base import CallablePath, Section

Reward = Annotated[float, Field(ge=0, le=1)]
ExitCode = Annotated[int, Field(ge=0, le=255)]


EXIT_REWARDS = {0: 1.0, 1: 0.0}


class GradingConfig(Section):
    """`[grading]`: who says what a workspace is worth. A failure of the grader is no verdict."""

    kind: Literal["harbor", "command", "pytest", "callable"] = Field(
        default="harbor",
        description="the task's tests/test.sh, a command's exit code, the share of the task's "
        "tests that pass, or a Python function",
    )
    command: tuple[str, ...] = Field(
        default=(),
        description='program and arguments (kind = "command"); {workspace} and {tests} become '
        "the folders",
    )
    exit_rewards: dict[ExitCode, Reward] = Field(
        default=EXIT_REWARDS,
        min_length=1,
        description="reward of each exit code of the command; any other code is no verdict",
    )
    function: CallablePath | None = Field(
        default=None,
        description='file.py:function or module:function (kind = "callable"), called with the '
        "paths of workspace and tests; it returns the reward",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=604_800, description="deadline of one try where a task sets none"
    )
    num_attempts: int = Field(
        default=2, ge=1, le=10, description="tries before there is no verdict"
    )
    placeholder_reward: Reward | None = Field(
        default=None,
        description="reward of an execution whose environment never started; left out: no verdict",
    )


def grading_problems(grading: GradingConfig) -> list[str]:
    """Keys that go with one kind only; one line each."""
    problems = []
    if (grading.kind == "command") != bool(grading.command):
        problems.append(
            f"grading.command = {list(grading.command)}: expected a program and its arguments "
            'if and only if grading.kind = "command"'
        )
    if (grading.kind == "callable") != (grading.function is not None):
        problems.append(
            f"grading.function = {grading.function or ''}: expected file.py:function or "
            'module:function if and only if grading.kind = "callable"'
        )
    if grading.kind != "command" and grading.exit_rewards != EXIT_REWARDS:
        problems.append(
            f"grading.exit_rewards = {grading.exit_rewards}: expected it beside "
            f'grading.kind = "command"; it is "{grading.kind}"'
        )
    return problems
