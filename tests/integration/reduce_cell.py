"""A cell's process for tests of the reduction: emulated gradients, real gloo groups, and traps.

Owns: where a trap springs. Must not know: what the controller makes of it. Invariant: a trap is a
file named after its cell, "PLACE WHAT", or "in WHAT SECONDS" after the begin of the reduce; it
springs once.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import torch

from opengyre.engines.compute import ComputeThread
from opengyre.engines.scripted import ScriptedEngine
from opengyre.runtime import messages as m
from opengyre.runtime.cell_process import main
from opengyre.runtime.child import run_child
from opengyre.runtime.parts import CellParts
from opengyre.runtime.planes import Planes, open_planes, pull_all
from opengyre.runtime.stages import StageProcesses
from opengyre.seams.cells import Rendezvous, StageTimes, StepCounts
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.trainer.emulated import EmulatedCell, EmulatedSettings
from opengyre.trainer.group_limits import GroupLimits
from opengyre.trainer.prefix_groups import GroupStore, PrefixGroups
from opengyre.transport.engine_server import EngineServer

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class GroupedCell(EmulatedCell):
    def __init__(self, planes: Planes, groups: PrefixGroups, trap: Path, num_weights: int) -> None:
        super().__init__(
            weights=planes.weights,
            gradients=planes.gradients,
            settings=EmulatedSettings(num_weights=num_weights),
        )
        self._groups = groups
        self._trap = trap

    def settle(self, step: int) -> tuple[StepCounts, list[StageTimes]]:
        self._pass("settle")
        return super().settle(step)

    def expose_gradients(self, step: int) -> tuple[Snapshot, StepCounts]:
        self._pass("share")
        return super().expose_gradients(step)

    def reduce_together(
        self, step: int, rendezvous: Rendezvous, others: Sequence[StepCounts]
    ) -> StepCounts:
        self._ledger.check_open(step)
        total = self._ledger.total_with(others)
        self._pass("before")
        if self._trap.exists() and self._trap.read_text().startswith("in "):
            after_s = float(self._trap.read_text().split()[2])
            threading.Timer(after_s, self._pass, ["in"]).start()
        flat = torch.from_numpy(self._sums)
        reduced = self._groups.reduce_copy(flat, rendezvous=rendezvous, stage=0)
        self._pass("after")
        if rendezvous.rank == 0:
            self._reduced[:] = reduced.numpy()
            self._ledger.reduced = total
        return total

    def _pass(self, place: str) -> None:
        """Springs the trap that is set here."""
        if not self._trap.exists():
            return
        where, what, *_ = self._trap.read_text().split()
        if where != place:
            return
        if what == "refuse":
            raise BoundaryError("reduce", f"refused {place}", retryable=True)
        self._trap.unlink()
        os.kill(os.getpid(), SIGNALS[what])


@contextlib.asynccontextmanager
async def build(setup: m.CellSetup) -> AsyncIterator[CellParts]:
    """`config_json` holds the limits of groups, the number of weights and the folder of traps."""
    config = json.loads(setup.config_json)
    limits = GroupLimits(**config["limits"])
    torch.set_num_threads(1)
    compute, store, groups = ComputeThread(), GroupStore(), PrefixGroups(limits=limits)
    with open_planes(setup) as planes, contextlib.ExitStack() as stack:
        stack.callback(store.close)
        stack.callback(groups.close)
        stack.callback(compute.close)
        engine = ScriptedEngine(lambda prompt, seed: [1])
        trap = Path(config["traps"]) / setup.engine
        async with EngineServer(engine, setup.link_address) as link:
            yield CellParts(
                engine=engine,
                backend=GroupedCell(planes, groups, trap, config["num_weights"]),
                compute=compute,
                link=link,
                pull=partial(pull_all, planes.weights),
                stages=StageProcesses(channels=[], processes=[]),
                store_address=store.address,
            )


if __name__ == "__main__":
    run_child(partial(main, build=build))
