"""The engine that `gyre harness try` asks: scripted, embedded over a model's folder, or a server.

Must not know: harnesses. Invariant: torch is imported only for a model.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine, text_policy
from opengyre.gateway.rendering.tokenizer import TokenizerAdapter
from opengyre.runtime.parts import END_OF_TURN
from opengyre.runtime.prepare import model_folder
from opengyre.runtime.trying.byte_model import write_byte_model
from opengyre.runtime.trying.solver import ScriptedSolver
from opengyre.seams.engine import RequestEngine

SCRIPTED_CONTEXT_TOKENS = 1 << 20
"""Bytes are tokens there; real programs send first requests of 120 kB."""
MODEL_RUNNING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TryEngine:
    """`model` is the folder of its tokenizer and chat format."""

    engine: RequestEngine
    model: Path
    context_tokens: int


def scripted_try_engine(
    solver: ScriptedSolver, folder: Path, *, tokens_per_s: float = 0.0
) -> TryEngine:
    """Answers of `solver` in tokens of one byte; writes its model folder to `folder`."""
    model = write_byte_model(folder)
    tokenizer = TokenizerAdapter(
        Tokenizer.from_file(str(model / "tokenizer.json")),
        name=str(model),
        end_of_turn=END_OF_TURN,
    )
    engine = ScriptedEngine(
        text_policy(tokenizer, solver.respond),
        ScriptedConfig(tokens_per_s=tokens_per_s, context_tokens=SCRIPTED_CONTEXT_TOKENS),
    )
    return TryEngine(engine=engine, model=model, context_tokens=SCRIPTED_CONTEXT_TOKENS)


@contextlib.asynccontextmanager
async def embedded_try_engine(name: str) -> AsyncIterator[TryEngine]:
    """The model at `name` (a folder or hub id) in this process. Raises ConfigError."""
    from opengyre.engines.compute import ComputeThread
    from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
    from opengyre.engines.torch_engine.model import load_model
    from opengyre.runtime.embedded import use_threads

    folder = model_folder(name)
    compute = ComputeThread(on_start=use_threads)
    try:
        module = await compute.run(load_model, folder)
        context_tokens = int(module.config.max_position_embeddings)
        config = TorchEngineConfig(max_running=MODEL_RUNNING, context_tokens=context_tokens)
        engine = await compute.run(TorchEngine, module, config, compute)
        yield TryEngine(engine=engine, model=folder, context_tokens=context_tokens)
    finally:
        compute.close()


@contextlib.asynccontextmanager
async def served_try_engine(url: str, model: Path) -> AsyncIterator[TryEngine]:
    """The vLLM or SGLang server at `url`, which serves the model whose folder is `model`.

    Raises ConfigError for what is no such server, BoundaryError when nobody answers.
    """
    from opengyre.engines.http_engine import HttpEngine
    from opengyre.engines.http_stream import parse_origin
    from opengyre.engines.probe import probe_engine

    origin = parse_origin(url)
    wire, facts = await probe_engine(origin)
    async with HttpEngine(origin, wire, facts) as engine:
        yield TryEngine(engine=engine, model=model, context_tokens=facts.context_tokens)
