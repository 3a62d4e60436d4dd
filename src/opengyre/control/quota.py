"""How many groups may be outstanding, and how old one gets by it (rules 3 and 5).

Owns: the two numbers, for the scheduler and for the config layer. Must not know: groups' states,
commands. Invariant: with `oversample` 1 they are num_steps B and num_steps - 1.
"""

import math

# A product that is this little above a whole number is that number: 1.1 x 10 is 11.
ROUNDING = 1e-6


def most_outstanding(*, num_steps: int, groups_per_step: int, oversample: float) -> int:
    """ceil(oversample num_steps B): what `num_steps` steps take if a share 1 - 1 / oversample of
    the groups is filtered."""
    return math.ceil(oversample * num_steps * groups_per_step - ROUNDING)


def least_staleness(*, num_steps: int, groups_per_step: int, oversample: float) -> int:
    """The least bound that some order of groups keeps: ceil(Q / B) - 1, Q = most_outstanding.

    Q holds at every moment: a boundary fills up to Q, and only boundaries dispatch. So a group
    dispatched at version v has at most Q - 1 others before it in dispatch order. Oldest first, each
    step takes B of those that are left, or all of them, and adds at most 1 to the version: the
    group is in the ceil(Q / B)-th step after its dispatch or in an earlier one, at most that many
    minus 1 versions later. With a smaller bound, nothing filtered and one update a step, the last
    of Q groups of one version is too old.
    """
    num_groups = most_outstanding(
        num_steps=num_steps, groups_per_step=groups_per_step, oversample=oversample
    )
    return max(0, -(-num_groups // groups_per_step) - 1)
