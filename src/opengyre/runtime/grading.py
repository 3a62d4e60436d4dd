"""Who gives the verdict of an execution, by the config, and what has one without being graded.

Owns: building the grader of each kind, refusing early what it lacks, the rules of endings. Must
not know: how a grader works, what a reward becomes. Invariant: nothing here turns a failure into
0; only `grading.placeholder_reward` gives a value to what never started.
"""

import importlib.util
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from opengyre.config.grading import GradingConfig
from opengyre.config.root import RunConfig
from opengyre.harness.selftest import OpenSandbox
from opengyre.runtime.callables import load_callable
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Ending, LaunchResult, Limits
from opengyre.seams.tasks import Grader, GraderKind, Verdict
from opengyre.tasks.command_grader import CommandGrader
from opengyre.tasks.grader import ScriptGrader
from opengyre.tasks.python_graders import PythonGrader


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingRules:
    """`overall_s` bounds an execution from its first launch on, None: nothing does."""

    overall_s: float | None = None
    is_overdue_graded: bool = False
    placeholder_reward: float | None = None

    def overdue(self, result: LaunchResult) -> LaunchResult:
        """A launch that we ended because its execution took too long in all."""
        reason = f"ran longer than {self.overall_s} s in all (harness.overall_timeout_s)"
        return replace(result, ending=Ending.TIMED_OUT, reason=reason)

    def ungraded(self, result: LaunchResult, *, is_overdue: bool) -> Verdict | None:
        """The verdict of what is not graded; None: it is graded."""
        if result.ending is Ending.NOT_STARTED and self.placeholder_reward is not None:
            reason = f"grading.placeholder_reward, it never started: {result.reason}"
            return Verdict(reward=self.placeholder_reward, reason=reason)
        if result.is_our_fault:
            return Verdict(reward=None, reason=f"lost: {result.reason}")
        if result.ending is Ending.CANCELLED:
            return Verdict(reward=None, reason="cancelled")
        if is_overdue and not self.is_overdue_graded:
            return Verdict(reward=None, reason=f"discarded: {result.reason}")
        return None


def ending_rules(config: RunConfig) -> EndingRules:
    return EndingRules(
        overall_s=config.harness.overall_timeout_s,
        is_overdue_graded=config.harness.overall_timeout_verdict == "graded",
        placeholder_reward=config.grading.placeholder_reward,
    )


def grader_of(grading: GradingConfig, sandbox: OpenSandbox, *, limits: Limits) -> Grader:
    """The grader of the config; `limits` are those of a launch, but for their time."""
    kind = GraderKind(grading.kind)
    shared: dict[str, Any] = {
        "run": sandbox.sandbox.run,
        "limits": replace(limits, wall_s=grading.timeout_s),
        "num_attempts": grading.num_attempts,
    }
    match kind:
        case GraderKind.HARBOR:
            return ScriptGrader(**shared)
        case GraderKind.COMMAND:
            rewards = grading.exit_rewards
            return CommandGrader(command=grading.command, exit_rewards=rewards, **shared)
        case GraderKind.PYTEST | GraderKind.CALLABLE:
            packages, function = package_paths(), grading.function or ""
            own = [Path(function.rpartition(":")[0]).parent] if ".py:" in function else []
            return PythonGrader(
                python=sandbox.report.python,
                package_paths=packages,
                function=function,
                read_only_paths=(*sandbox.report.python_paths, *packages, *own),
                **shared,
            )
    assert_never(kind)


def grader_files(grading: GradingConfig) -> tuple[Path, ...]:
    """Files of this machine that the grader must be able to read. Raises ConfigError."""
    if GraderKind(grading.kind) is GraderKind.PYTEST:
        found = importlib.util.find_spec("pytest")
        if found is None or found.origin is None:
            what = "expected pytest where opengyre is installed"
            raise ConfigError(f'grading.kind = "pytest": {what}; install it (pip install pytest)')
        return (Path(found.origin),)
    if grading.function is None:
        return ()
    load_callable(grading.function, key="grading.function")
    place = grading.function.rpartition(":")[0]
    spec = None if place.endswith(".py") else importlib.util.find_spec(place)
    return (Path(place if spec is None else spec.origin or place),)


def package_paths() -> tuple[Path, ...]:
    """Where this process finds packages beside the standard library."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    known = {standard, standard / "lib-dynload"}
    folders = (Path(path).resolve() for path in sys.path if path and Path(path).is_dir())
    return tuple(dict.fromkeys(folder for folder in folders if folder not in known))
