"""How many groups, and in which order: rules 3 and 5 over the naive model.

Owns: the number to dispatch, the order of groups, who may overtake. Must not know: plans, views.
"""

from tests.sim.control_lives import GroupLife
from tests.sim.control_model import Truth


def num_to_dispatch(truth: Truth, num_steps_left: int) -> int:
    """Rule 3."""
    config = truth.config
    wanted = (config.run_ahead + config.steps_per_burst) * config.groups_per_step
    wanted = min(wanted, num_steps_left * config.groups_per_step)
    return max(0, wanted - len(truth.outstanding))


def in_order(groups: list[GroupLife]) -> list[GroupLife]:
    """Oldest version first, then dispatch order."""
    return sorted(groups, key=lambda one: (one.version, one.group))


def may_overtake(truth: Truth, group: GroupLife, taken: set[str] | set[object]) -> bool:
    """With it in this step, every older unassigned group still finds a place in time."""
    assert truth.step is not None
    num_now = truth.config.groups_per_step - len(taken) - 1
    older = [
        one
        for one in truth.of_state("live", "ready")
        if one.version < group.version and one.group not in taken
    ]
    for deadline in {truth.deadline(one) for one in older}:
        num_due = sum(truth.deadline(one) <= deadline for one in older)
        num_steps = deadline - truth.step.version
        if num_due > num_now + num_steps * truth.config.groups_per_step:
            return False
    return num_now >= 0
