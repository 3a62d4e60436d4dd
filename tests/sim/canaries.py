"""Bugs planted in the real shell, each of which the hunt must find.

Owns: what is planted, in words and in code. Must not know: how a run is checked. Invariants: each
canary changes one thing that a person could have written; nothing is left planted afterwards.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from opengyre.control import commands as c
from opengyre.control.facts import EngineReady, ExecutionClosed, Outcome
from opengyre.control.groups import GroupBook
from opengyre.engines.scripted import ScriptedEngine
from opengyre.gateway.continuation import Generation, Sampled
from opengyre.gateway.handoffs import Kept
from opengyre.gateway.recording import RecordQueue
from opengyre.gateway.restoring import Earlier
from opengyre.gateway.routing import Routing
from opengyre.runtime import messages as m
from opengyre.runtime.apply import Applier
from opengyre.runtime.executions import Executions
from opengyre.runtime.gateway_process import GatewayProcess
from opengyre.runtime.gateways import Gateways
from opengyre.runtime.inbox import Inbox
from opengyre.runtime.reduction import Reducer
from opengyre.runtime.steps import Steps
from opengyre.runtime.supervise import Supervisor
from opengyre.seams.records import SegmentRef, Span
from opengyre.store.checkpoints import Checkpoints
from opengyre.store.journal import Journal
from opengyre.trainer.stream import StepStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """`owner.name` is replaced by `make(what it was)`."""

    words: str
    owner: type
    name: str
    make: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        real = self.owner.__dict__[self.name]
        setattr(self.owner, self.name, self.make(real))
        try:
            yield
        finally:
            setattr(self.owner, self.name, real)


def _repeats_the_last_token(real: Any) -> Any:
    def _next_request(self: Any, seat: Any) -> Any:
        request = real(self, seat)
        if not self.sampled.ids:
            return request
        return msgspec.structs.replace(request, prompt_ids=request.prompt_ids[:-1])

    return _next_request


def _restarts_the_budget(real: Any) -> Any:
    def _num_left(self: Any) -> int:
        return int(self._plan.request.max_new_tokens)

    return _num_left


def _merges_versions(real: Any) -> Any:
    def add(self: Any, chunk: Any, engine_id: str) -> None:
        end = len(self.ids) + len(chunk.ids)
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        version = self.spans[0].policy_version if self.spans else chunk.policy_version
        start = self.spans[-1].start if self.spans else 0
        span = Span(start=start, end=end, policy_version=version, engine=engine_id)
        self.spans[-1:] = [span]

    return add


def _opens_before_the_load(real: Any) -> Any:
    async def _publish(self: Any, command: c.Publish) -> None:
        parts = self._parts
        await parts.gateways.shut_door(command.engine)
        await parts.processes.call(command.engine, m.FreezeAll())
        await parts.gateways.open_door(command.engine)
        await real(self, command)

    return _publish


def _freezes_without_waiting(real: Any) -> Any:
    async def _apply_to_engine(self: Any, command: Any) -> None:
        if not isinstance(command, c.Freeze):
            return await real(self, command)
        frozen = asyncio.ensure_future(real(self, command))
        frozen.add_done_callback(lambda done: done.cancelled() or done.exception())

    return _apply_to_engine


def _keeps_what_the_dead_did(real: Any) -> Any:
    def drop_member(self: Any, cell: int) -> tuple[str, ...]:
        issued = self._state.issued
        done = {number: one for number, one in issued.items() if one.cell == cell and one.is_done}
        for number in done:
            del issued[number]
        back = real(self, cell)
        issued.update(done)
        return tuple(back)

    return drop_member


def _ignores_a_death_in_the_reduce(real: Any) -> Any:
    async def _reduced(self: Any, opened: Any) -> Any:
        await self._drained(opened)
        reduced = await self._reduce_once(opened)
        opened.is_reduced = True
        return reduced

    return _reduced


def _leaves_out_the_silent(real: Any) -> Any:
    async def settle(self: Any, step: int, cells: tuple[int, ...]) -> Any:
        answers = await self._ask(dict.fromkeys(cells, m.Settle(step=step)), 15.0)
        return {cell: one for cell, one in answers.items() if isinstance(one, m.Settled)}

    return settle


def _returns_work_after_the_reduce(real: Any) -> Any:
    async def _reduced(self: Any, opened: Any) -> Any:
        reduced = await real(self, opened)
        opened.is_reduced = False
        return reduced

    return _reduced


def _closes_before_the_end(real: Any) -> Any:
    async def _play(self: Any, one: Any) -> None:
        self._inbox.tell(ExecutionClosed(execution=one.execution, outcome=Outcome.COMPLETED))
        await real(self, one)

    return _play


def _routes_by_what_was(real: Any) -> Any:
    async def _launch_once(self: Any, one: Any, folder: Any) -> Any:
        engine = self.engine_by_execution[one.execution]

        def _session(one: Any, key: str) -> m.OpenSession:
            return m.OpenSession(execution=one.execution, key=key, engine=engine, seed=one.seed)

        self._session = _session
        return await real(self, one, folder)

    return _launch_once


def _acknowledges_at_once(real: Any) -> Any:
    async def committed(self: Any, seq: int, timeout_s: float = 0.0) -> None:
        if self._is_closing:
            await real(self, seq)

    return committed


def _tells_before_the_sync(real: Any) -> Any:
    async def run(self: Any) -> None:
        while True:
            turn = await self._queue.get()
            self._on_turn(turn)
            await self._recorder.sync()
            self._queue.task_done()

    return run


def _leaves_the_checkpoint_partial(real: Any) -> Any:
    def commit(self: Any, step: int, *, version: int, lineage: int = 0) -> None:
        return None

    return commit


def _forgets_who_is_held(real: Any) -> Any:
    def open_door(self: Any, engine_id: str) -> None:
        if engine_id in self._doors:
            self._doors[engine_id].is_open = True

    return open_door


def _clears_after_taking(real: Any) -> Any:
    async def batch(self: Any, wait_s: float) -> list[Any]:
        try:
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        facts, self._facts = self._facts, []
        await asyncio.sleep(0)
        self._arrived.clear()
        return list(facts)

    return batch


def _announces_without_weights(real: Any) -> Any:
    async def _announce(self: Any, ready: m.CellReady) -> None:
        published = self._steps.last_published
        if ready.engine == "c0" or published is None:
            return await real(self, ready)
        connect = m.ConnectEngine(
            engine=ready.engine, incarnation=ready.incarnation, link_address=ready.link_address
        )
        await self._gateways.connect_engine(connect)
        engine = self._engines[ready.engine].engine
        self._inbox.tell(
            EngineReady(engine=engine, incarnation=ready.incarnation, version=published[0])
        )

    return _announce


def _never_connects_again(real: Any) -> Any:
    async def _keep(self: Any, link: Any, message: Any) -> None:
        return

    return _keep


def _opens_under_an_old_version(real: Any) -> Any:
    async def _publish(self: Any, command: c.Publish) -> None:
        await real(self, command)
        if self._due[command.engine] > command.version:
            await self._parts.gateways.open_door(command.engine)

    return _publish


def _tells_only_what_is_new(real: Any) -> Any:
    async def restore(self: Any, setup: m.GatewaySetup) -> None:
        last = SegmentRef(segment=2**31, offset_bytes=0, crc32=0)
        await real(self, msgspec.structs.replace(setup, told=last))

    return restore


def _starts_sessions_anew(real: Any) -> Any:
    def _open_session(self: Any, message: m.OpenSession, earlier: Earlier) -> None:
        real(self, message, Earlier(first_turn=earlier.first_turn))

    return _open_session


def _comes_back_behind_shut_doors(real: Any) -> Any:
    async def _connect(self: Any, one: Any, link: Any) -> None:
        await self.lives.ask(one, link.connect)

    return _connect


def _routes_only_the_living(real: Any) -> Any:
    async def set_routes(self: Any, moves: Any) -> None:
        up = [(name, to) for name, to in moves if name in self._home]
        await real(self, [(name, to) for name, to in up if self._home[name].is_up.is_set()])

    return set_routes


def _forgets_to_filter(real: Any) -> Any:
    def member_done(self: Any, group: Any, **told: Any) -> None:
        real(self, group, **{**told, "is_filtering": False})

    return member_done


def _keeps_at_every_freeze(real: Any) -> Any:
    async def freeze_all(self: Any, *, keeps_kv: bool = False) -> None:
        await real(self, keeps_kv=True)

    return freeze_all


def _never_lets_go(real: Any) -> Any:
    def let_go(self: Any) -> None:
        return None

    return let_go


CANARIES: dict[str, Canary] = {
    "repeated token": Canary(
        words="a continued request starts one token too early",
        owner=Generation,
        name="_next_request",
        make=_repeats_the_last_token,
    ),
    "restarted budget": Canary(
        words="a continued request gets the whole token budget again",
        owner=Generation,
        name="_num_left",
        make=_restarts_the_budget,
    ),
    "merged versions": Canary(
        words="tokens of a later version are told as the first one's",
        owner=Sampled,
        name="add",
        make=_merges_versions,
    ),
    "early door": Canary(
        words="the gateway opens an engine before it loaded its due version",
        owner=Applier,
        name="_publish",
        make=_opens_before_the_load,
    ),
    "freeze not awaited": Canary(
        words="a freeze is answered before the engine stopped writing",
        owner=Applier,
        name="_apply_to_engine",
        make=_freezes_without_waiting,
    ),
    "claim not returned": Canary(
        words="what a satellite did before it died stays done",
        owner=StepStream,
        name="drop_member",
        make=_keeps_what_the_dead_did,
    ),
    "death in the reduce": Canary(
        words="a member that died while sums were reduced still counts",
        owner=Steps,
        name="_reduced",
        make=_ignores_a_death_in_the_reduce,
    ),
    "silent member": Canary(
        words="who does not settle is left out, and what it did with it",
        owner=Reducer,
        name="settle",
        make=_leaves_out_the_silent,
    ),
    "return after the reduce": Canary(
        words="a member that dies after the reduce takes its work out of the step",
        owner=Steps,
        name="_reduced",
        make=_returns_work_after_the_reduce,
    ),
    "early close": Canary(
        words="an execution is closed, and its slot free, before its agent is gone",
        owner=Executions,
        name="_play",
        make=_closes_before_the_end,
    ),
    "stale route": Canary(
        words="a session is opened where its execution was when the launch began",
        owner=Executions,
        name="_launch_once",
        make=_routes_by_what_was,
    ),
    "unsynced plan": Canary(
        words="commands start before their plan is on disk",
        owner=Journal,
        name="committed",
        make=_acknowledges_at_once,
    ),
    "unsynced turn": Canary(
        words="a turn is told before its tokens are on disk",
        owner=RecordQueue,
        name="run",
        make=_tells_before_the_sync,
    ),
    "partial checkpoint": Canary(
        words="a checkpoint is acknowledged before it has its name",
        owner=Checkpoints,
        name="commit",
        make=_leaves_the_checkpoint_partial,
    ),
    "forgotten hold": Canary(
        words="opening a door wakes nobody who waits at it",
        owner=Routing,
        name="open_door",
        make=_forgets_who_is_held,
    ),
    "lost wake-up": Canary(
        words="the controller forgets facts that come while it takes others",
        owner=Inbox,
        name="batch",
        make=_clears_after_taking,
    ),
    "no weights": Canary(
        words="an engine that was started again serves before it has the published weights",
        owner=Supervisor,
        name="_announce",
        make=_announces_without_weights,
    ),
    "broken link": Canary(
        words="a broken engine link is not made again",
        owner=GatewayProcess,
        name="_keep",
        make=_never_connects_again,
    ),
    "untold turns": Canary(
        words="turns that a dead gateway wrote and did not tell are never told",
        owner=GatewayProcess,
        name="restore",
        make=_tells_only_what_is_new,
    ),
    "forgotten turns": Canary(
        words="a gateway that was started again knows sessions, but none of their turns",
        owner=GatewayProcess,
        name="_open_session",
        make=_starts_sessions_anew,
    ),
    "shut doors": Canary(
        words="a gateway that was started again never opens a door",
        owner=Gateways,
        name="_connect",
        make=_comes_back_behind_shut_doors,
    ),
    "lost routes": Canary(
        words="a gateway that is down when routes change never learns them",
        owner=Gateways,
        name="set_routes",
        make=_routes_only_the_living,
    ),
    "equal rewards": Canary(
        words="a group without variance is trained though such groups are filtered",
        owner=GroupBook,
        name="member_done",
        make=_forgets_to_filter,
    ),
    "old publication": Canary(
        words="a publication that ends late opens its engine though a newer version is due",
        owner=Applier,
        name="_publish",
        make=_opens_under_an_old_version,
    ),
    "kept at a publication": Canary(
        words="an engine that loads new weights hands over what the old ones computed",
        owner=ScriptedEngine,
        name="freeze_all",
        make=_keeps_at_every_freeze,
    ),
    "kept for ever": Canary(
        words="a gateway never asks for the end of a pin",
        owner=Kept,
        name="let_go",
        make=_never_lets_go,
    ),
}
