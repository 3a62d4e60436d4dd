"""A profile's labels as the gateway's rules.

Must not know: which harness. Invariant: a condition keeps its meaning; `is_empty = false` is what
a condition means that says nothing more.
"""

import re

from opengyre.config.harness_profile import HarnessProfile, LabelCondition
from opengyre.gateway.labels import Condition, LabelRule


def label_rules(profile: HarnessProfile) -> tuple[LabelRule, ...]:
    return tuple(
        LabelRule(role=rule.role, conditions=tuple(_condition(one) for one in rule.all))
        for rule in profile.labels
    )


def _condition(one: LabelCondition) -> Condition:
    return Condition(
        header=(one.header or "").lower(),
        field=one.field or "",
        text=one.text or "",
        pattern=None if one.matches is None else re.compile(one.matches),
        is_empty=bool(one.is_empty),
    )
