"""Publication: a version is due at every rollout engine, and doors open on it (2.5).

Owns: due versions, opening, quarantine. Must not know: steps, checkpoints.
Invariants: only an engine whose verified version is its due version is open; an engine that is
not verified in time leaves the capacity.
"""

import heapq

from opengyre.control.cells import Engine, EngineState
from opengyre.control.commands import OpenDoor, Publish
from opengyre.control.run_state import RunState
from opengyre.control.slots import displace


def reconcile(run: RunState, now_s: float) -> None:
    """Each serving engine that changed: load what is due there, or open its door."""
    if not run.topology.unsettled:
        return
    changed = sorted(run.topology.unsettled.values(), key=lambda engine: engine.number)
    run.topology.unsettled.clear()
    for engine in changed:
        if engine.state is EngineState.ABSENT or not run.topology.is_in_rollout(engine):
            continue
        if (engine.verified_version or 0) < run.published_version:
            _publish(run, engine, now_s)
        elif engine.state is EngineState.SHUT:
            _open(run, engine)


def published(run: RunState, engine: Engine, version: int) -> None:
    """`version` is loaded, verified and served at `engine`; a late one ends its quarantine."""
    engine.verified_version = version
    if version == engine.due_version and engine.state is not EngineState.OPEN:
        run.topology.move_engine(engine, EngineState.OPEN)


def check_timeouts(run: RunState, now_s: float) -> None:
    """Late: quarantined. Twice as late: suspect, to be fenced and started anew."""
    while (deadline_s := next_deadline_s(run)) is not None and now_s >= deadline_s:
        _, _, name = heapq.heappop(run.publish_deadlines)
        engine = run.engines[name]
        if engine.state is EngineState.PUBLISHING:
            run.topology.move_engine(engine, EngineState.QUARANTINED)
            displace(run, engine)
            _watch(run, engine)
        else:
            late_s = now_s - engine.due_since_s
            words = f"version {engine.due_version} is not verified after {late_s:.0f} s"
            run.topology.suspect(engine, words)


def next_deadline_s(run: RunState) -> float | None:
    """The earliest time at which a publication is late; deadlines that no longer hold go."""
    deadlines = run.publish_deadlines
    while deadlines:
        deadline_s, _, name = deadlines[0]
        if deadline_s == _deadline_s(run, run.engines[name]):
            return deadline_s
        heapq.heappop(deadlines)
    return None


def _deadline_s(run: RunState, engine: Engine) -> float | None:
    timeout_s = run.config.publish_timeout_s
    if engine.state is EngineState.PUBLISHING:
        return engine.due_since_s + timeout_s
    if engine.state is EngineState.QUARANTINED:
        return engine.due_since_s + 2 * timeout_s
    return None


def _watch(run: RunState, engine: Engine) -> None:
    deadline_s = _deadline_s(run, engine)
    if deadline_s is not None:
        heapq.heappush(run.publish_deadlines, (deadline_s, engine.number, engine.engine))


def _publish(run: RunState, engine: Engine, now_s: float) -> None:
    version = run.published_version
    is_loading = engine.state in (EngineState.PUBLISHING, EngineState.QUARANTINED)
    if is_loading and engine.due_version == version:
        return
    engine.due_version, engine.due_since_s = version, now_s
    run.topology.move_engine(engine, EngineState.PUBLISHING)
    _watch(run, engine)
    out = run.outbox
    reason = f"version {version} is due; {len(engine.live)} executions live on it"
    out.add(Publish(command_id=out.new_id(), reason=reason, engine=engine.engine, version=version))


def _open(run: RunState, engine: Engine) -> None:
    run.topology.move_engine(engine, EngineState.OPENING)
    out = run.outbox
    reason = f"version {engine.verified_version} is verified"
    out.add(OpenDoor(command_id=out.new_id(), reason=reason, engine=engine.engine))
