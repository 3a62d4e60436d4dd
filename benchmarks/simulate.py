"""What a simulated run costs: processor seconds, events per second, memory at its highest.

Each case is a run of examples/paper/E0.toml with more of something, in a process of its own. An
event is a fact told to the scheduler or a plan it made. Owns nothing but the measuring. Run:
`python benchmarks/simulate.py`; a word picks the cases whose name begins with it.
"""

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from opengyre.config.load_simulation import load_simulation
from opengyre.simulate.from_config import scenario_of
from opengyre.simulate.world import simulate

E0 = Path(__file__).parent.parent / "examples" / "paper" / "E0.toml"
KIB_PER_MIB = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`num_steps` steps of `num_groups` groups x 8 on cells of `devices_per_cell` nodes; a node
    trains as quickly and has as many slots as E0's."""

    num_cells: int
    devices_per_cell: int
    num_groups: int
    num_steps: int

    def overrides(self) -> list[str]:
        return [
            f"topology.num_cells={self.num_cells}",
            f"topology.devices_per_cell={self.devices_per_cell}",
            f"schedule.groups_per_step={self.num_groups}",
            f"scenario.num_steps={self.num_steps}",
            f"scenario.stop_after_step={self.num_steps}",
        ]


CASES: Mapping[str, Size] = {
    "E0": Size(num_cells=8, devices_per_cell=4, num_groups=16, num_steps=12),
    "192 nodes": Size(num_cells=48, devices_per_cell=4, num_groups=64, num_steps=48),
    "100 cells": Size(num_cells=100, devices_per_cell=4, num_groups=1_250, num_steps=6),
    "1000 cells": Size(num_cells=1_000, devices_per_cell=4, num_groups=1_250, num_steps=6),
    "10000 cells": Size(num_cells=10_000, devices_per_cell=1, num_groups=1_250, num_steps=12),
}


def measure(size: Size) -> tuple[float, int, float]:
    """(processor seconds, events, MiB at the highest) of one run; to be called in a process of its
    own, because memory at its highest is that of the process."""
    scenario = scenario_of(load_simulation(E0, size.overrides()))
    begin_s = time.process_time()
    result = simulate(scenario, seed=1)
    spent_s = time.process_time() - begin_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB
    return spent_s, result.num_events, peak_mib


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    print(
        f"{'case':18} {'executions':>10} {'cpu':>8} {'events':>10} {'events/s':>9} {'memory':>10}"
    )
    context = get_context("spawn")
    for name, size in CASES.items():
        if not name.startswith(word):
            continue
        with context.Pool(1) as pool:
            spent_s, num_events, peak_mib = pool.apply(measure, (size,))
        num = size.num_groups * 8 * size.num_steps
        print(
            f"{name:18} {num:10,} {spent_s:6.1f} s {num_events:10,} {num_events / spent_s:9,.0f} "
            f"{peak_mib:6.0f} MiB"
        )


if __name__ == "__main__":
    main()
