"""The executions of a run and where they work: launches, moves, publications, deaths, ends.

Owns: the works, their engines' clocks, grading. Must not know: commands, roles, training.
Invariants: each dispatched execution is closed once; a move, a publication or a death never takes
work from an execution, it only adds a stall.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from opengyre.control.errors import InvariantError
from opengyre.control.facts import ExecutionClosed, Fact, Outcome, VerdictGiven
from opengyre.control.ids import EngineId, ExecutionId, GroupId
from opengyre.simulate.accounts import Books
from opengyre.simulate.costs import Costs
from opengyre.simulate.draws import Purpose, uniform
from opengyre.simulate.kernel import Kernel, Token
from opengyre.simulate.rollout import RolloutEngine, Work
from opengyre.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    kernel: Kernel
    costs: Costs
    workload: Workload
    seed: int
    books: Books
    tell: Callable[[Fact], None]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Execution-seconds and counts of what happened to executions."""

    num_dispatched: int = 0
    num_closed: int = 0
    num_moves: int = 0
    num_replaced: int = 0
    closed_work_s: float = 0.0
    cancelled_s: float = 0.0
    credited_s: float = 0.0
    stalled_s: float = 0.0
    recomputed_tokens: float = 0.0
    kv_moved_tokens: float = 0.0
    num_by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))


class Fleet:
    """Group weights are kept until the run ends: a redone step needs them again."""

    def __init__(self, parts: FleetParts, engines: list[RolloutEngine]) -> None:
        self._parts = parts
        self._kernel = parts.kernel
        self.engines = {engine.engine: engine for engine in engines}
        self.tally = Tally()
        self._queued: dict[ExecutionId, tuple[int, int]] = {}
        self._works: dict[ExecutionId, Work] = {}
        self._ends: dict[EngineId, tuple[float, Token]] = {}
        self._graders: list[float] = []
        self._lengths_s: dict[int, list[float]] = {}
        self._mean_s = parts.workload.mean_s
        self._num_waves = 0

    @property
    def waterlevel(self) -> int:
        return self.tally.num_dispatched - self.tally.num_closed

    def dispatch(self, groups: tuple[tuple[GroupId, tuple[ExecutionId, ...]], ...]) -> None:
        for group, members in groups:
            number = int(group[1:])
            self._queued.update((one, (number, at)) for at, one in enumerate(members))
            self._count_dispatched(len(members))

    def dispatch_eval(self, executions: tuple[ExecutionId, ...]) -> None:
        """A wave of evaluation has the trace of its own number."""
        self._num_waves += 1
        self._queued.update((one, (-self._num_waves, at)) for at, one in enumerate(executions))
        self._count_dispatched(len(executions))

    def launch(self, execution: ExecutionId, engine: EngineId) -> None:
        group, member = self._queued.pop(execution)
        draw = self._parts.workload.draw(self._parts.seed, group, member)
        work = Work(
            execution=execution,
            number=int(execution[1:]),
            draw=draw,
            group=group,
            owed_s=draw.duration_s,
            left_s=draw.duration_s,
        )
        self._works[execution] = work
        self._place(work, self.engines[engine])
        self._plan_end(self.engines[engine])

    def cancel(self, execution: ExecutionId, *, was_queued: bool) -> None:
        if was_queued:
            del self._queued[execution]
            self._count_closed(Outcome.CANCELLED)
            return
        work = self._works.get(execution)
        if work is None:
            return
        engine = work.engine
        if engine is not None:
            self._take(work, engine)
            self._plan_end(engine)
        self.tally.cancelled_s += work.worked_s
        self._close(work, Outcome.CANCELLED)

    def move(self, moves: tuple[tuple[ExecutionId, EngineId], ...]) -> None:
        """Live ones leave their engine; displaced ones come back to work. Closed ones are over."""
        touched: dict[EngineId, RolloutEngine] = {}
        for execution, to in moves:
            work = self._works.get(execution)
            if work is None:
                continue
            source = work.engine
            destination = touched[to] = self.engines[to]
            if source is None:
                self._bring_back(work, destination)
                continue
            self._ask(work)
            self._take(work, source)
            touched[source.engine] = source
            self.tally.num_moves += 1
            self._place(work, destination)
            self._charge_move(work, destination)
        for engine in touched.values():
            self._plan_end(engine)

    def publish(self, name: EngineId, load_s: float) -> None:
        """Requests are held while it loads, then recomputed; tool calls go on."""
        engine, now_s = self.engines[name], self._kernel.now_s
        engine.settle(now_s)
        engine.shut_until_s = now_s + load_s
        for work in engine.live.values():
            self._ask(work)
            self._charge_recompute(work, engine, from_s=engine.shut_until_s)
        self._plan_end(engine)

    def displace(self, name: EngineId) -> None:
        """The engine died: requests are held, tool calls go on."""
        engine, now_s = self.engines[name], self._kernel.now_s
        for work in list(engine.live.values()):
            self._ask(work)
            self._take(work, engine)
            work.displaced_s = now_s
        engine.shut_until_s = engine.prefill_free_s = engine.link_free_s = now_s
        self._plan_end(engine)

    def weigh(self, group: GroupId) -> float:
        """Mean length of its executions with a verdict, in mean lengths of the workload."""
        lengths_s = self._lengths_s.get(int(group[1:]), [])
        return sum(lengths_s) / len(lengths_s) / self._mean_s if lengths_s else 1.0

    @property
    def aborted_s(self) -> float:
        """Work done on engines that is in no execution: closed, cancelled or live."""
        done_s = math.fsum(engine.progress_s for engine in self._settled())
        live_s = 0.0
        for work in self._works.values():
            left_s = work.left_s if work.engine is None else work.engine.left_of(work)
            live_s += work.owed_s - left_s
        tally = self.tally
        return done_s + tally.credited_s - tally.closed_work_s - tally.cancelled_s - live_s

    def _settled(self) -> list[RolloutEngine]:
        engines = list(self.engines.values())
        for engine in engines:
            engine.settle(self._kernel.now_s)
        return engines

    def _count_dispatched(self, num: int) -> None:
        now = self._parts.books.now
        self._parts.books.settle(self._kernel.now_s)
        self.tally.num_dispatched += num
        now.waterlevel += num

    def _count_closed(self, outcome: Outcome) -> None:
        books = self._parts.books
        books.settle(self._kernel.now_s)
        self.tally.num_closed += 1
        self.tally.num_by_outcome[outcome] += 1
        books.now.waterlevel -= 1

    def _place(self, work: Work, engine: RolloutEngine) -> None:
        now_s = self._kernel.now_s
        engine.add(work, now_s)
        self._parts.books.change_used(self._parts.books.by_engine[engine.engine], 1, now_s)

    def _take(self, work: Work, engine: RolloutEngine) -> None:
        now_s = self._kernel.now_s
        engine.remove(work, now_s)
        self._parts.books.change_used(self._parts.books.by_engine[engine.engine], -1, now_s)

    def _plan_end(self, engine: RolloutEngine) -> None:
        """One event per engine: the next end on it."""
        following = engine.next_finish()
        planned = self._ends.get(engine.engine)
        if following is not None and planned is not None and planned[0] == following[0]:
            return
        if planned is not None:
            self._kernel.cancel(planned[1])
            del self._ends[engine.engine]
        if following is not None:
            time_s = max(following[0], self._kernel.now_s)
            token = self._kernel.at(time_s, lambda: self._end_next(engine))
            self._ends[engine.engine] = (time_s, token)

    def _end_next(self, engine: RolloutEngine) -> None:
        del self._ends[engine.engine]
        following = engine.next_finish()
        if following is None:
            raise InvariantError(f"nothing ends on {engine.engine}")
        work = following[1]
        self._take(work, engine)
        self.tally.closed_work_s += work.owed_s - work.left_s
        outcome = Outcome.TIMED_OUT if work.draw.is_capped else Outcome.COMPLETED
        self._close(work, outcome)
        self._plan_end(engine)

    def _close(self, work: Work, outcome: Outcome) -> None:
        del self._works[work.execution]
        self._count_closed(outcome)
        self._parts.tell(ExecutionClosed(execution=work.execution, outcome=outcome))
        if outcome is Outcome.CANCELLED or not work.draw.has_verdict:
            self._give_verdict(work, has_verdict=False)
            return
        costs = self._parts.costs.grader
        drawn = uniform(self._parts.seed, Purpose.GRADER, work.number) if costs.fail_rate else 1.0
        has_verdict = drawn >= costs.fail_rate
        ends_s = self._graded_s()
        if ends_s <= self._kernel.now_s:
            self._give_verdict(work, has_verdict=has_verdict)
            return
        self._kernel.at(ends_s, lambda: self._give_verdict(work, has_verdict=has_verdict))

    def _graded_s(self) -> float:
        """When a grading that is asked for now ends."""
        costs, now_s = self._parts.costs.grader, self._kernel.now_s
        starts_s = now_s
        if costs.num_graders is not None and len(self._graders) >= costs.num_graders:
            starts_s = max(now_s, heapq.heappop(self._graders))
        ends_s = starts_s + costs.grade_s
        if costs.num_graders is not None:
            heapq.heappush(self._graders, ends_s)
        return ends_s

    def _give_verdict(self, work: Work, *, has_verdict: bool) -> None:
        tokens = 0
        if has_verdict:
            self._lengths_s.setdefault(work.group, []).append(work.draw.duration_s)
            tokens = max(1, int(self._parts.costs.tools.tokens(work.draw.duration_s, 0.5)))
        self._parts.tell(
            VerdictGiven(
                execution=work.execution,
                reward=work.draw.reward if has_verdict else None,
                reason="" if has_verdict else "none in the trace",
                num_trainable_tokens=tokens,
            )
        )

    # ---- where an execution is in its turn, drawn when somebody asks

    def _draw(self, work: Work, purpose: Purpose) -> float:
        return uniform(self._parts.seed, purpose, work.number, work.num_asked)

    def _ask(self, work: Work) -> None:
        """Is it in a model call or in a tool call, and how long will that last?"""
        tools = self._parts.costs.tools
        work.num_asked += 1
        work.is_sampling = self._draw(work, Purpose.PLACE_IN_TURN) >= tools.share
        work.tool_left_s = 0.0
        if not work.is_sampling:
            work.tool_left_s = -tools.call_s * math.log(self._draw(work, Purpose.TOOL_TIME))

    def _tokens(self, work: Work) -> float:
        engine = work.engine
        left_s = work.left_s if engine is None else engine.left_of(work)
        worked_s = max(0.0, work.owed_s - left_s)
        return self._parts.costs.tools.tokens(worked_s, self._draw(work, Purpose.TOKENS))

    def _charge_move(self, work: Work, engine: RolloutEngine) -> None:
        """Blocks of the same version are read where they can be; else context is recomputed."""
        costs, now_s = self._parts.costs.engine, self._kernel.now_s
        opens_s = max(now_s + costs.freeze_s, engine.shut_until_s)
        is_same_version = engine.shut_until_s <= now_s
        if work.is_sampling and costs.has_kv_handoff and is_same_version:
            tokens = self._tokens(work)
            self.tally.kv_moved_tokens += tokens
            self._stall(work, engine, engine.read_kv(tokens, opens_s) - now_s)
            return
        self._charge_recompute(work, engine, from_s=opens_s)

    def _charge_recompute(self, work: Work, engine: RolloutEngine, *, from_s: float) -> None:
        """A running request waits for its turn; one that comes later finds the engine free."""
        tokens, now_s = self._tokens(work), self._kernel.now_s
        self.tally.recomputed_tokens += tokens
        if work.is_sampling:
            self._stall(work, engine, engine.prefill(tokens, from_s) - now_s)
            return
        held_s = max(0.0, from_s - now_s - work.tool_left_s)
        self._stall(work, engine, held_s + engine.prefill_s(tokens))

    def _stall(self, work: Work, engine: RolloutEngine, stall_s: float) -> None:
        self.tally.stalled_s += stall_s
        engine.stall(work, stall_s)

    def _bring_back(self, work: Work, engine: RolloutEngine) -> None:
        """A displaced one has a slot again; what its tool call did meanwhile counts."""
        now_s = self._kernel.now_s
        away_s = now_s - (work.displaced_s if work.displaced_s is not None else now_s)
        gained_s = min(away_s, work.tool_left_s, work.left_s)
        work.left_s -= gained_s
        work.tool_left_s -= min(away_s, work.tool_left_s)
        work.displaced_s = None
        self.tally.credited_s += gained_s
        self.tally.stalled_s += away_s - gained_s
        self.tally.num_replaced += 1
        self._place(work, engine)
        self._charge_recompute(work, engine, from_s=max(now_s, engine.shut_until_s))
