"""Runs that are struck, and what must be true of them afterwards.

Owns: deadlines short enough for a test, the checks. Must not know: which faults there are.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from run_rig import Driven, Watch, drive
from safetensors.numpy import load_file

from opengyre.control import facts as f
from opengyre.runtime import apply, run
from opengyre.runtime.processes import Processes
from opengyre.runtime.steps import StepParts
from opengyre.store.observations import StepReport
from opengyre.store.run_folder import open_run_folder
from opengyre.trainer.group_limits import GroupLimits
from opengyre.views.verify import verify_run
from tests.chaos.faults import Fault, Moment

STAGED = Path(__file__).with_name("staged.toml")
LEASE_S = 6.0
CALL_S = 8.0
SHORT_LIMITS = GroupLimits(settle_s=6.0, grace_s=3.0, star_s=8.0)
SCHEDULE = (
    "schedule.group_size=2",
    "schedule.groups_per_step=3",
    "schedule.steps_per_burst=2",
    "schedule.max_staleness=3",
    "schedule.supply_hold_s=0.1",
    "schedule.recall_after_s=30",
    "schedule.join_deadline_s=5",
    "schedule.publish_timeout_s=8",
    "topology.num_cells=2",
    "topology.slots_per_cell=4",
    "training.micro_step_tokens=560",
    "store.keep_checkpoints=2",
)


@contextlib.contextmanager
def short_deadlines() -> Iterator[None]:
    """Who stands still is found in seconds. Cells keep their own, longer ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CLAIM_LEASE_S", LEASE_S)
        patch.setattr(apply, "LOAD_TIMEOUT_S", CALL_S)
        patch.setitem(Processes.call.__kwdefaults__, "timeout_s", CALL_S)
        patch.setitem(StepParts.__init__.__kwdefaults__, "limits", SHORT_LIMITS)
        yield


def drive_struck(
    folder: Path, tasks: Path, *overrides: str, watch: Watch, config: Path, deadline_s: float
) -> Driven:
    with short_deadlines():
        return drive(
            folder,
            tasks,
            *SCHEDULE,
            *overrides,
            watch=watch,
            config=config,
            deadline_s=deadline_s,
        )


def slots_for(faults: Sequence[Fault]) -> str:
    """So many that cells leave rollout early and train together; if the core is to be struck on its
    way back, so few that it is not kept in training."""
    returns = any(one.cell == 0 and one.moment is Moment.RETURN for one in faults)
    return f"topology.slots_per_standalone={13 if returns else 24}"


def num_steps_for(num_faults: int) -> int:
    """A burst for each, and as many more as a moment may keep one waiting for, such as a pipeline
    that stands without data."""
    return 2 * (num_faults + 8)


def assert_it_held(driven: Driven, *, num_steps: int) -> None:
    """Every step is done once, every promise kept, nothing left."""
    assert driven.end.exit_code == 0, driven.end.reason
    assert sorted(_last_reports(driven)) == list(range(1, num_steps + 1))
    assert_promises_are_kept(driven)
    assert f.Outcome.LOST not in driven.outcomes().values()
    assert_nothing_is_left(driven)


def _last_reports(driven: Driven) -> dict[int, StepReport]:
    """By step; a step of a core that died is done anew."""
    return {one.step: one for one in driven.all(StepReport)}


def assert_promises_are_kept(driven: Driven) -> None:
    results = verify_run(open_run_folder(driven.end.folder))
    broken = [problem for result in results for problem in result.problems]
    assert not broken
    assert all(result.is_kept for result in results)


def assert_nothing_is_left(driven: Driven) -> None:
    """No process, socket, folder or shared memory of a run that this test process drove."""
    mark = f"gyre-{os.getpid()}-"
    owned = (str(driven.end.folder), mark)
    for entry in Path("/proc").glob("[0-9]*"):
        words = _read(entry / "cmdline")
        assert not [one for one in owned if one in words], words
        assert _parent(entry) != os.getpid(), words
    for base in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        assert not list(base.glob(f"{mark}*"))


def _parent(entry: Path) -> int:
    fields = _read(entry / "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def last_weights(driven: Driven) -> dict[str, np.ndarray]:
    """Of the last checkpoint."""
    checkpoints = (driven.end.folder / "checkpoints").glob("step-*")
    newest = max(checkpoints, key=lambda one: int(one.name.removeprefix("step-")))
    return load_file(newest / "model.safetensors")


def consumed(driven: Driven) -> set[str]:
    return {group for one in _last_reports(driven).values() for group in one.groups}
