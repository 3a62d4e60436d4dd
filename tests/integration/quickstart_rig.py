"""The quickstart's own config, shortened, and tasks for it."""

import subprocess
import sys
from pathlib import Path

from run_rig import MAKE_TASKS, ROOT

QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.toml"
SHORT = (
    "run.seed=1",
    "run.num_steps=4",
    "topology.slots_per_cell=12",
    "topology.slots_per_standalone=36",
    "schedule.group_size=4",
    "schedule.groups_per_step=4",
    "schedule.steps_per_burst=2",
    "schedule.max_staleness=2",
    "schedule.supply_hold_s=0.2",
    "training.micro_step_tokens=560",
)


def make_tasks(out: Path, *, seed: int, num: int) -> Path:
    command = [sys.executable, str(MAKE_TASKS), "--seed", str(seed), "--num", str(num)]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=30)
    return out
