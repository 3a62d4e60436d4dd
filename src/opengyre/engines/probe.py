"""Finds out how a server takes token ids, by asking it for one token.

Owns: the choice among the known wires. Must not know: what the engine will be used for.
Invariant: a server is accepted only after it gave the id and the logprob of a token it sampled.
"""

from enum import StrEnum

import msgspec

from opengyre.engines.http_engine import ServerFacts, TokenWire
from opengyre.engines.http_stream import EventLines, HttpPool, Origin
from opengyre.engines.sglang import LOGPROB_MODE as SGLANG_LOGPROB_MODE
from opengyre.engines.sglang import SglangGenerate
from opengyre.engines.vllm import LOGPROB_MODE as VLLM_LOGPROB_MODE
from opengyre.engines.vllm import VllmCompletions, VllmGenerate
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.errors import BoundaryError, ConfigError

PROBE_TIMEOUT_S = 60.0
_LOGPROB_MODES = {"vllm": VLLM_LOGPROB_MODE, "sglang": SGLANG_LOGPROB_MODE}
_OK = 200


class EngineKind(StrEnum):
    AUTO = "auto"
    VLLM = "vllm"
    SGLANG = "sglang"


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def probe_engine(
    origin: Origin,
    *,
    kind: EngineKind = EngineKind.AUTO,
    context_tokens: int | None = None,
    policy_version: int = 0,
) -> tuple[TokenWire, ServerFacts]:
    """The wire of the server at `origin` and what it is known by.

    `context_tokens` lowers the server's own, or stands for it. Raises BoundaryError when nobody
    answers there, ConfigError for a server that gives no token ids.
    """
    pool = HttpPool(origin)
    try:
        model = await _model(pool)
        wire = await _choose(pool, kind, model.id)
    finally:
        pool.close()
    known = [size for size in (context_tokens, model.max_model_len) if size]
    if not known:
        raise ConfigError(
            f"{origin}: it does not tell its context; give the number of tokens it can take"
        )
    facts = ServerFacts(
        context_tokens=min(known),
        logprob_mode=_LOGPROB_MODES[wire.kind],
        policy_version=policy_version,
    )
    return wire, facts


async def _model(pool: HttpPool) -> _Model:
    status, body = await pool.call("GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
    if status in (401, 403):
        raise ConfigError(f"{pool.origin}: it asks for another key (HTTP {status}); --engine-key")
    if status != _OK:
        raise ConfigError(f"{pool.origin}: not a model server (GET /v1/models: HTTP {status})")
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{pool.origin}: not a model server (/v1/models: {error})") from error
    if not models.data:
        raise ConfigError(f"{pool.origin}: it serves no model")
    return models.data[0]


async def _choose(pool: HttpPool, kind: EngineKind, model: str) -> TokenWire:
    wires: list[TokenWire] = [VllmGenerate(model), SglangGenerate(), VllmCompletions(model)]
    reasons = []
    for wire in wires:
        if kind not in (EngineKind.AUTO, EngineKind(wire.kind)):
            continue
        reason = await _why_not(pool, wire)
        if not reason:
            return wire
        reasons.append(f"{wire.path}: {reason}")
    raise ConfigError(
        f"{pool.origin}: it gives no token ids with logprobs ({'; '.join(reasons)}); "
        "expected a vLLM or SGLang server"
    )


async def _why_not(pool: HttpPool, wire: TokenWire) -> str:
    """Empty if it gave a token's id and logprob."""
    asked = GenerateRequest(
        request_id="gyre-probe", execution="", prompt_ids=[1], max_new_tokens=1, temperature=0.0
    )
    status, answer = await pool.call("POST", wire.path, wire.body(asked), timeout_s=PROBE_TIMEOUT_S)
    if status != _OK:
        return f"HTTP {status}"
    read = wire.reader()
    try:
        parts = [read(event) for event in EventLines().feed(answer + b"\n") if event != b"[DONE]"]
    except BoundaryError as error:
        return error.reason
    num_ids = sum(len(part.ids) for part in parts)
    if num_ids == 0:
        return next((part.reason for part in parts if part.reason), "it gave no token")
    if num_ids != sum(len(part.logprobs) for part in parts):
        return "it gives token ids without logprobs"
    return ""
