"""Builds what a cell's process is made of, by the config: engine, link, training side, planes.

Must not know: roles or the controller. Invariant: engine and training side of an embedded cell
share one module and one compute thread; an emulated cell imports no torch.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opengyre.config.load import parse_resolved
from opengyre.config.root import RunConfig
from opengyre.engines.compute import ComputeThread
from opengyre.runtime.callables import load_callable
from opengyre.runtime.memory_plan import predicted
from opengyre.runtime.messages import CellSetup
from opengyre.runtime.planes import Array, Planes, open_planes, pull_all
from opengyre.runtime.stages import StageProcesses, start_stages
from opengyre.seams.cells import CellBackend
from opengyre.seams.engine import Engine
from opengyre.seams.memory import MemoryHeld
from opengyre.seams.weights import Snapshot
from opengyre.store.observations import Role
from opengyre.transport.engine_server import EngineServer

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellParts:
    """`pull` copies a snapshot out of a plane, verified. `backend` is None if it never trains;
    `store_address` is where the members of its prefix meet, "" if they do not; `predicted` is what
    each role holds at most, of embedded parts."""

    engine: Engine
    backend: CellBackend | None
    compute: ComputeThread
    link: EngineServer
    pull: Callable[[Snapshot], Mapping[str, Array]]
    stages: StageProcesses
    store_address: str = ""
    predicted: Mapping[Role, MemoryHeld] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def build_parts(setup: CellSetup) -> AsyncIterator[CellParts]:
    """Open everything of this process; closed again in the reverse order: what the compute thread
    has in hand ends before the planes go."""
    config = parse_resolved(setup.config_json)
    async with contextlib.AsyncExitStack() as stack:
        planes = stack.enter_context(open_planes(setup, kind=config.topology.weight_plane))
        num_others = 0 if setup.cell is None else config.topology.stages_per_cell - 1
        stages = await stack.enter_async_context(start_stages(num_others))
        compute = ComputeThread()
        stack.callback(compute.close)
        backend: CellBackend | None = None
        store_address = ""
        if config.topology.engine == "embedded":
            from opengyre.runtime.embedded import build_engine, build_training

            engine, module = await compute.run(build_engine, config, setup, compute)
            if setup.cell is not None:
                side = await compute.run(build_training, config, setup, module, planes, stages)
                stack.callback(side.close)
                backend, store_address = side.backend, side.store.address
        else:
            engine = scripted_engine(config, setup)
            backend = None if setup.cell is None else emulated_cell(config, planes)
        link = await stack.enter_async_context(EngineServer(engine, setup.link_address))
        link.close_door()
        yield CellParts(
            engine=engine,
            backend=backend,
            compute=compute,
            link=link,
            pull=partial(pull_all, planes.weights),
            stages=stages,
            store_address=store_address,
            predicted=predicted(config, is_core=setup.cell == 0),
        )


def scripted_engine(config: RunConfig, setup: CellSetup) -> Engine:
    """Answers of the config's policy function, at its speed."""
    from tokenizers import Tokenizer

    from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine, text_policy
    from opengyre.gateway.rendering.tokenizer import TokenizerAdapter

    scripted = config.engine.scripted
    policy = load_callable(scripted.policy or "", key="engine.scripted.policy")
    respond = partial(policy, mistake_rate=scripted.mistakes)
    path = Path(config.model.path)
    tokenizer = TokenizerAdapter(
        Tokenizer.from_file(str(path / "tokenizer.json")), name=str(path), end_of_turn=END_OF_TURN
    )
    return ScriptedEngine(
        text_policy(tokenizer, respond),
        ScriptedConfig(
            tokens_per_s=scripted.tokens_per_s,
            max_running=setup.slots,
            context_tokens=config.sampling.context_tokens,
            name=setup.life,
            kv_handoff=config.engine.kv_handoff,
            kv_lease_s=config.engine.kv_lease_s,
            kv_handoff_idle=config.engine.kv_handoff_idle,
        ),
    )


def emulated_cell(config: RunConfig, planes: Planes) -> CellBackend:
    from opengyre.trainer.emulated import EmulatedCell, EmulatedSettings

    settings = EmulatedSettings(tokens_per_s=config.training.emulated_tokens_per_s)
    return EmulatedCell(weights=planes.weights, gradients=planes.gradients, settings=settings)
