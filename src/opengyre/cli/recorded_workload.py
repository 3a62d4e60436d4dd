"""The durations of a recorded run as a workload: `--from RUN`.

Owns: which executions count. Must not know: how a run is simulated.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opengyre.seams.errors import ConfigError

if TYPE_CHECKING:
    from opengyre.config.simulation import SimulationConfig
    from opengyre.simulate.workload import Workload


def recorded_workload(run_path: Path, configs: Sequence["SimulationConfig"] = ()) -> "Workload":
    """Launch to close of every execution of a recorded run, by group; caps and rates are those of
    `configs`, if any. What was cancelled or lost has no length of its own and is left out."""
    from opengyre.control.facts import Outcome
    from opengyre.simulate.from_config import endings_of
    from opengyre.simulate.workload import EmpiricalWorkload, Endings, Recorded
    from opengyre.store.journal import read_journal
    from opengyre.store.run_folder import open_run_folder
    from opengyre.views.fold import fold

    all_endings = {endings_of(one.workload) for one in configs}
    if len(all_endings) > 1:
        raise ConfigError("--from: expected the same caps and rates in [workload] of all files")
    try:
        folder = open_run_folder(run_path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--from {run_path}: cannot read it: {reason}") from error
    state = fold(read_journal(folder.db))
    groups: dict[str, list[Recorded]] = {}
    for one in state.executions.values():
        is_cut = one.outcome in (None, Outcome.CANCELLED, Outcome.LOST)
        if one.group is None or one.launched_s is None or one.closed_s is None or is_cut:
            continue
        length_s = one.closed_s - one.launched_s
        groups.setdefault(one.group, []).append(
            Recorded(
                duration_s=length_s,
                has_verdict=one.reward is not None,
                is_capped=one.outcome is Outcome.TIMED_OUT,
            )
        )
    if not any(one.duration_s > 0 for group in groups.values() for one in group):
        raise ConfigError(f"--from {run_path}: expected a run with executions that have closed")
    members = tuple(tuple(group) for group in groups.values())
    return EmpiricalWorkload(groups=members, endings=next(iter(all_endings), Endings()))
