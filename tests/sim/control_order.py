"""How many groups, and in which order: rules 3 and 5 over the naive model.

Owns: the number to dispatch, the order of groups, who may overtake. Must not know: plans, views.
"""

from fractions import Fraction
from math import ceil

from opengyre.control.config import Overdue
from opengyre.control.ids import GroupId
from tests.sim.control_lives import GroupLife
from tests.sim.control_model import Truth


def num_to_dispatch(truth: Truth, num_steps_left: int) -> int:
    """Rule 3."""
    config = truth.config
    num_steps = min(config.run_ahead + config.steps_per_burst, num_steps_left)
    wanted = ceil(Fraction(str(config.oversample)) * num_steps * config.groups_per_step)
    return max(0, wanted - len(truth.outstanding))


def is_supplied_at_boundary(truth: Truth) -> bool:
    """Rule 9, with what was just dispatched."""
    num_ready, num_places = len(truth.of_state("ready")), truth.config.groups_per_step
    if not truth.config.is_streaming:
        return truth.is_whole_supply()
    return min(num_ready, num_places) >= truth.config.supply_fraction * num_places


def takeable(truth: Truth, taken: set[GroupId]) -> list[GroupLife]:
    """Ready groups that the open step may still take beside those it holds, oldest first."""
    found: list[GroupLife] = []
    for group in in_order(truth.of_state("ready")):
        held = taken | {one.group for one in found}
        if group.group in held or len(held) >= truth.config.groups_per_step:
            continue
        if truth.config.overdue is Overdue.WAIT and not may_overtake(truth, group, held):
            break
        found.append(group)
    return found


def in_order(groups: list[GroupLife]) -> list[GroupLife]:
    """Oldest version first, then dispatch order."""
    return sorted(groups, key=lambda one: (one.version, one.group))


def may_overtake(truth: Truth, group: GroupLife, taken: set[GroupId]) -> bool:
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
