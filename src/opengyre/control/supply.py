"""Supply: enough ready groups, for long enough.

Owns: the hold timer of rule 7(c). Must not know: which cell asks, capacity.
Invariant: held means the condition was true at every update since `since_s`.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SupplyTimer:
    hold_s: float
    since_s: float | None = None

    def update(self, now_s: float, *, is_met: bool) -> None:
        if not is_met:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s

    def restart(self) -> None:
        """A step opened: the next update starts the hold afresh."""
        self.since_s = None

    def is_held(self, now_s: float) -> bool:
        return self.since_s is not None and now_s >= self.since_s + self.hold_s
