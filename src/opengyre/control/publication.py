"""Publication: a version is due at every rollout engine, and doors open on it (2.5).

Owns: due versions, opening, quarantine. Must not know: steps, checkpoints.
Invariants: only an engine whose verified version is its due version is open; an engine that is
not verified in time leaves the capacity.
"""

from opengyre.control.cells import CellRole, Engine, EngineState
from opengyre.control.commands import OpenDoor, Publish
from opengyre.control.run_state import CORE, RunState
from opengyre.control.slots import displace


def reconcile(run: RunState, now_s: float) -> None:
    """Each serving engine: load what is due there, or open its door."""
    target = run.published_version
    for engine in run.engines.values():
        if engine.state is EngineState.OPEN and engine.verified_version == target:
            continue
        if engine.state is EngineState.ABSENT or not _is_in_rollout(run, engine):
            continue
        if engine.cell == CORE and run.is_core_wanted:
            continue
        if (engine.verified_version or 0) < target:
            _publish(run, engine, now_s)
        elif engine.state is EngineState.SHUT:
            _open(run, engine)


def published(run: RunState, engine: Engine, version: int) -> None:
    """`version` is loaded, verified and served at `engine`; a late one ends its quarantine."""
    engine.verified_version = version
    if version == engine.due_version and engine.state is not EngineState.OPEN:
        engine.move(EngineState.OPEN)


def check_timeouts(run: RunState, now_s: float) -> None:
    """Late: quarantined. Twice as late: suspect, to be fenced and started anew."""
    timeout_s = run.config.publish_timeout_s
    for engine in run.engines.values():
        if engine.state is EngineState.PUBLISHING and now_s >= engine.due_since_s + timeout_s:
            engine.move(EngineState.QUARANTINED)
            displace(run, engine)
        elif (
            engine.state is EngineState.QUARANTINED and now_s >= engine.due_since_s + 2 * timeout_s
        ):
            late_s = now_s - engine.due_since_s
            engine.suspicion = f"version {engine.due_version} is not verified after {late_s:.0f} s"


def _is_in_rollout(run: RunState, engine: Engine) -> bool:
    return engine.cell is None or run.cells[engine.cell].role is CellRole.ROLLOUT


def _publish(run: RunState, engine: Engine, now_s: float) -> None:
    version = run.published_version
    is_loading = engine.state in (EngineState.PUBLISHING, EngineState.QUARANTINED)
    if is_loading and engine.due_version == version:
        return
    engine.move(EngineState.PUBLISHING)
    engine.due_version, engine.due_since_s = version, now_s
    out = run.outbox
    reason = f"version {version} is due; {len(engine.live)} executions live on it"
    out.add(Publish(command_id=out.new_id(), reason=reason, engine=engine.engine, version=version))


def _open(run: RunState, engine: Engine) -> None:
    engine.move(EngineState.OPENING)
    out = run.outbox
    reason = f"version {engine.verified_version} is verified"
    out.add(OpenDoor(command_id=out.new_id(), reason=reason, engine=engine.engine))
