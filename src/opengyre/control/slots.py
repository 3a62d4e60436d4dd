"""Slots: who sits where, and filling what is free (rule 6).

Owns: taking and releasing slots, the choice of an engine, launches and the placing of displaced
executions. Must not know: why slots became free.
Invariant: an execution holds at most one slot; an engine never more than it has.
"""

from opengyre.control.cells import Engine, EngineState
from opengyre.control.commands import Launch, Reroute
from opengyre.control.errors import InvariantError
from opengyre.control.executions import Execution, ExecutionState
from opengyre.control.ids import EngineId, ExecutionId
from opengyre.control.run_state import RunState


def take_slot(execution: Execution, engine: Engine) -> None:
    if engine.num_free <= 0:
        raise InvariantError(f"{engine.engine} has no free slot for {execution.execution}")
    engine.live[execution.execution] = None
    execution.engine = engine.engine
    if execution.group is not None:
        members = execution.group.num_members_by_engine
        members[engine.engine] = members.get(engine.engine, 0) + 1


def release_slot(run: RunState, execution: Execution) -> None:
    if execution.engine is None:
        return
    del run.engines[execution.engine].live[execution.execution]
    if execution.group is not None:
        execution.group.num_members_by_engine[execution.engine] -= 1
    execution.engine = None


def displace(run: RunState, engine: Engine) -> None:
    """Its executions keep harness and workspace and wait for a slot elsewhere."""
    for execution_id in tuple(engine.live):
        displace_one(run, run.executions.by_id[execution_id])


def displace_one(run: RunState, execution: Execution) -> None:
    release_slot(run, execution)
    execution.move(ExecutionState.DISPLACED)
    run.executions.displaced[execution.execution] = execution


def fill(run: RunState, now_s: float) -> None:
    """Displaced executions first, then the queue; nothing waits while an open slot is free."""
    book = run.executions
    if not book.displaced and not book.queue:
        return
    open_engines = [one for one in run.engines.values() if one.state is EngineState.OPEN]
    num_free = sum(one.num_free for one in open_engines)
    is_free_to_reroute = now_s >= run.reroute_not_before_s and not is_rerouting(run)
    if num_free > 0 and book.displaced and is_free_to_reroute:
        num_free -= _place_displaced(run, open_engines, num_free)
    if book.displaced:
        return
    while num_free > 0 and book.queue:
        _launch(run, next(iter(book.queue.values())), open_engines)
        num_free -= 1


def is_rerouting(run: RunState) -> bool:
    """One change of routes at a time: a later one must not be overtaken by an earlier one."""
    return run.outbox.is_pending(run.reroute)


def _place_displaced(run: RunState, open_engines: list[Engine], num_free: int) -> int:
    book = run.executions
    moves: list[tuple[ExecutionId, EngineId]] = []
    for execution in tuple(book.displaced.values())[:num_free]:
        engine = _best(execution, open_engines)
        del book.displaced[execution.execution]
        execution.move(ExecutionState.PLACED)
        take_slot(execution, engine)
        moves.append((execution.execution, engine.engine))
    run.is_dirty = True
    run.reroute = run.outbox.add(
        Reroute(
            command_id=run.outbox.new_id(),
            reason=f"{len(moves)} displaced executions find slots; {len(book.displaced)} wait on",
            moves=tuple(moves),
        )
    )
    return len(moves)


def _launch(run: RunState, execution: Execution, open_engines: list[Engine]) -> None:
    engine = _best(execution, open_engines)
    del run.executions.queue[execution.execution]
    execution.move(ExecutionState.PLACED)
    take_slot(execution, engine)
    run.counts.add_launched()
    run.outbox.add(
        Launch(
            command_id=run.outbox.new_id(),
            reason=f"{engine.engine} had {engine.num_free + 1} free slots",
            execution=execution.execution,
            engine=engine.engine,
        )
    )


def _best(execution: Execution, engines: list[Engine]) -> Engine:
    """Prefix affinity, then most free slots, then the engine that stays longest."""
    by_engine = execution.group.num_members_by_engine if execution.group is not None else {}
    best, best_key = None, (0, 0, 0)
    for engine in engines:
        num_free = engine.num_free
        if num_free <= 0:
            continue
        key = (by_engine.get(engine.engine, 0), num_free, -engine.stay)
        if best is None or key > best_key:
            best, best_key = engine, key
    if best is None:
        raise InvariantError(f"no open engine has a slot for {execution.execution}")
    return best
