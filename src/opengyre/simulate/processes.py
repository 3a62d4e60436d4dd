"""Processes of engines: alive or dead, and what each was told in order.

Owns: incarnations, lines, deaths and restarts. Must not know: what a command means.
Invariants: what was promised by a process that died is never kept; commands of one line end in
the order in which they came.
"""

from collections.abc import Callable, Iterable

from opengyre.control.facts import EngineLost, EngineReady, Fact
from opengyre.control.ids import EngineId
from opengyre.simulate.kernel import Kernel


class Processes:
    """Nothing is up at first. `version_of(engine)`: what it loads when it starts."""

    def __init__(
        self,
        engines: Iterable[EngineId],
        *,
        kernel: Kernel,
        tell: Callable[[Fact], None],
        version_of: Callable[[EngineId], int],
    ) -> None:
        self._kernel, self._tell, self._version_of = kernel, tell, version_of
        self._incarnation = dict.fromkeys(engines, 0)
        self._is_alive = dict.fromkeys(self._incarnation, False)
        self._line_free_s = dict.fromkeys(self._incarnation, 0.0)

    def is_alive(self, engine: EngineId) -> bool:
        return self._is_alive[engine]

    def start(self, engine: EngineId) -> None:
        """A new incarnation is up. It must be dead."""
        self._is_alive[engine] = True
        self._incarnation[engine] += 1
        self._line_free_s[engine] = self._kernel.now_s
        self._tell(
            EngineReady(
                engine=engine,
                incarnation=self._incarnation[engine],
                version=self._version_of(engine),
            )
        )

    def kill(self, engine: EngineId, reason: str) -> None:
        """It must be alive."""
        self._is_alive[engine] = False
        self._tell(EngineLost(engine=engine, incarnation=self._incarnation[engine], reason=reason))

    def in_line(self, engine: EngineId, cost_s: float, action: Callable[[], None]) -> None:
        """`action` after what `engine` was told before, and `cost_s`."""
        now_s = self._kernel.now_s
        ends_s = max(now_s, self._line_free_s[engine]) + cost_s
        self._line_free_s[engine] = ends_s
        self.later(engine, ends_s - now_s, action)

    def later(self, engine: EngineId, cost_s: float, action: Callable[[], None]) -> None:
        """At once if it costs nothing; never if the process dies before."""
        if cost_s <= 0:
            action()
            return
        incarnation = self._incarnation[engine]

        def act() -> None:
            if self._is_alive[engine] and self._incarnation[engine] == incarnation:
                action()

        self._kernel.after(cost_s, act)
