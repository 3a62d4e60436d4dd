"""One line for a journal row that a watcher cares about, none for the others.

Owns: the words. Must not know: terminals. Invariant: a run of hours gives a few lines a step.
"""

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue
from opengyre.views.summary import mean_eval
from opengyre.views.words import number, reward, step_words


def notes_of(value: JournalValue) -> list[str]:
    """Lines for one row, usually none."""
    match value:
        case c.Plan():
            return [words for one in value.commands if (words := _command_note(one))]
        case f.EngineLost():
            return [f"{value.engine} lost: {value.reason}"]
        case f.StopRequested():
            return [f"stopping: {value.reason}"]
        case _:
            words = _observation_note(value)
            return [words] if words else []


def _command_note(command: c.AnyCommand) -> str:
    match command:
        case c.DispatchGroups():
            size = sum(len(members) for _, members in command.groups)
            groups = number(len(command.groups), "group")
            executions = number(size, "execution")
            return f"burst {command.burst}: {groups} dispatched, {executions}"
        case c.DispatchEval():
            size = len(command.executions)
            return f"evaluation of version {command.version}: {number(size, 'task')} dispatched"
        case c.EnterTraining():
            return f"cell {command.cell} leaves rollout: {command.reason}"
        case c.LeaveTraining():
            return f"cell {command.cell} returns to rollout: {command.reason}"
        case c.AbandonStep():
            return f"step {command.step} is abandoned: {command.reason}"
        case c.EndRun():
            return f"ending: {command.reason}"
        case _:
            return ""


def _observation_note(value: JournalValue) -> str:
    match value:
        case seen.MemberJoined(is_mid_batch=True):
            return f"cell {value.cell} joined step {value.step} mid-batch"
        case seen.StepReport():
            return step_words(value)
        case seen.EvalResult():
            size = len(value.rewards)
            words = f"{reward(mean_eval(value))} on {number(size, 'held-out task')}"
            return f"eval reward of version {value.version}: {words}"
        case seen.HarnessError(during_move=True):
            return f"{value.execution} got an error after a move: {value.kind}"
        case seen.GatewayLost():
            return _gateway_note(value)
        case seen.VersionPublished(num_continued=num) if num:
            words = f"{value.version} on {value.engine} across {number(num, 'live request')}"
            return f"published version {words}"
        case _:
            return ""


def _gateway_note(value: seen.GatewayLost) -> str:
    held = number(len(value.executions), "execution")
    if value.gone_s is None:
        return f"{value.gateway} lost with {held}: {value.reason}"
    return f"{value.gateway} back after {value.gone_s:.1f} s with {held}: {value.reason}"
