"""Slots: who sits where, and filling what is free (rule 6).

Owns: who takes and releases a slot, launches and the placing of displaced
executions. Must not know: why slots became free.
Invariant: an execution holds at most one slot; an engine never more than it has.
An engine's load is the executions that hold its slots, whatever they do: one that waits in the
engine's queue, at its door or for a tool counts like one that generates.
"""

from opengyre.control.cells import Engine
from opengyre.control.commands import Launch, Reroute
from opengyre.control.executions import Execution, ExecutionState
from opengyre.control.ids import EngineId, ExecutionId
from opengyre.control.run_state import RunState


def take_slot(run: RunState, execution: Execution, engine: Engine) -> None:
    run.topology.take_slot(execution.execution, engine)
    execution.engine = engine.engine
    if execution.group is not None:
        members = execution.group.num_members_by_engine
        members[engine.engine] = members.get(engine.engine, 0) + 1


def release_slot(run: RunState, execution: Execution) -> None:
    if execution.engine is None:
        return
    run.topology.release_slot(execution.execution, run.engines[execution.engine])
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
    topology = run.topology
    is_free_to_reroute = now_s >= run.reroute_not_before_s and not is_rerouting(run)
    if topology.num_free_open > 0 and book.displaced and is_free_to_reroute:
        _place_displaced(run)
    if book.displaced:
        return
    while topology.num_free_open > 0 and book.queue:
        _launch(run, next(iter(book.queue.values())))


def is_rerouting(run: RunState) -> bool:
    """One change of routes at a time: a later one must not be overtaken by an earlier one."""
    return run.outbox.is_pending(run.reroute)


def _place_displaced(run: RunState) -> None:
    book, num_free = run.executions, run.topology.num_free_open
    moves: list[tuple[ExecutionId, EngineId]] = []
    for execution in tuple(book.displaced.values())[:num_free]:
        engine = run.topology.best_for(execution)
        del book.displaced[execution.execution]
        execution.move(ExecutionState.PLACED)
        take_slot(run, execution, engine)
        moves.append((execution.execution, engine.engine))
    run.is_dirty = True
    run.reroute = run.outbox.add(
        Reroute(
            command_id=run.outbox.new_id(),
            reason=f"{len(moves)} displaced executions find slots; {len(book.displaced)} wait on",
            moves=tuple(moves),
        )
    )


def _launch(run: RunState, execution: Execution) -> None:
    engine = run.topology.best_for(execution)
    del run.executions.queue[execution.execution]
    execution.move(ExecutionState.PLACED)
    take_slot(run, execution, engine)
    run.counts.add_launched()
    run.outbox.add(
        Launch(
            command_id=run.outbox.new_id(),
            reason=f"{engine.engine} had {engine.num_free + 1} free slots",
            execution=execution.execution,
            engine=engine.engine,
        )
    )
