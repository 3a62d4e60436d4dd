"""Where a stage's time goes.

Owns: four accounts, one of which is always open. Must not know: what is computed.
Invariant: the accounts add up to the time since the clock was made.
"""

import enum
from collections.abc import Callable

from opengyre.seams.cells import StageTimes


class Account(enum.Enum):
    FORWARD = "forward_s"
    BACKWARD = "backward_s"
    BUBBLE = "bubble_s"
    WAITING = "waiting_s"


class StageClock:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._spent_s = dict.fromkeys(Account, 0.0)
        self._account = Account.WAITING
        self._since_s = now_s()

    def enter(self, account: Account) -> None:
        now_s = self._now_s()
        self._spent_s[self._account] += now_s - self._since_s
        self._account, self._since_s = account, now_s

    def idle(self, num_in_flight: int) -> None:
        self.enter(Account.BUBBLE if num_in_flight else Account.WAITING)

    @property
    def times(self) -> StageTimes:
        self.enter(self._account)
        return StageTimes(**{one.value: spent_s for one, spent_s in self._spent_s.items()})
