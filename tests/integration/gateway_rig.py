"""A real gateway over scripted engines, a recorder in memory, and clients over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openai
from tokenizers import Tokenizer

from opengyre.engines.scripted import Respond, ScriptedConfig, ScriptedEngine, text_policy
from opengyre.gateway.continuation import Continued
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.seams.engine import Chunk, Engine, EngineCaps, Finish, GenerateRequest
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


class PlainTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(TOKENIZER.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def policy(respond_text: Callable[[str, int], str]) -> Respond:
    return text_policy(PlainTokenizer(), respond_text)


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition` holds; at most 10 s."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("the condition never held")


class MemoryRecorder:
    def __init__(self) -> None:
        self.records: list[TokenRecord] = []
        self.num_synced = 0

    def append(self, record: TokenRecord) -> SegmentRef:
        self.records.append(record)
        return SegmentRef(segment=0, offset_bytes=len(self.records) - 1, crc32=0)

    async def sync(self) -> None:
        covers = len(self.records)
        await asyncio.sleep(0)
        self.num_synced = covers


@dataclass
class Rig:
    gateway: Gateway
    recorder: MemoryRecorder
    told: list[TurnRecord] = field(default_factory=list)
    holds: list[tuple[str, bool]] = field(default_factory=list)
    continued: list[Continued] = field(default_factory=list)

    def client(self, execution: str = "e000001", key: str = "key-1") -> openai.AsyncOpenAI:
        base = f"{self.gateway.address}/{execution}/v1"
        return openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)

    def committed(self) -> list[TokenRecord]:
        return [record for record in self.recorder.records if record.header.is_committed]

    def prompt_of(self, record: TokenRecord) -> list[int]:
        """A turn's prompt, restored from records alone."""
        header = record.header
        kept: list[int] = []
        if header.parent:
            parent = next(r for r in self.committed() if r.header.turn == header.parent)
            kept = (self.prompt_of(parent) + parent.completion_ids)[: header.num_kept_tokens]
        return kept + record.new_prompt_ids


@asynccontextmanager
async def open_rig(
    engines: dict[str, Engine], *, max_context_tokens: int = 4096, **settings: Any
) -> AsyncIterator[Rig]:
    recorder = MemoryRecorder()
    told: list[TurnRecord] = []
    holds: list[tuple[str, bool]] = []
    continued: list[Continued] = []

    def on_turn(turn: TurnRecord) -> None:
        assert recorder.num_synced > turn.ref.offset_bytes, "told before its bytes were synced"
        told.append(turn)

    events = GatewayEvents(
        on_turn=on_turn,
        on_hold=lambda execution, started: holds.append((execution, started)),
        on_continued=continued.append,
    )
    async with Gateway(
        GatewaySettings(max_context_tokens=max_context_tokens, **settings),
        renderer=load_renderer(MODEL),
        recorder=recorder,
        events=events,
    ) as gateway:
        for engine_id, engine in engines.items():
            gateway.connect_engine(engine_id, engine, 0)
        gateway.open_session("e000001", "key-1", next(iter(engines)), seed=7)
        yield Rig(gateway, recorder, told, holds, continued)


def scripted(respond_text: Callable[[str, int], str], **config: float) -> ScriptedEngine:
    return ScriptedEngine(policy(respond_text), ScriptedConfig(**config))


class CutEngine:
    """An engine that cuts each part after `num_tokens`, as a freeze or as its own death.

    `num_cuts` None: every part. Everything else is the engine behind it.
    """

    def __init__(
        self,
        inner: ScriptedEngine,
        *,
        num_tokens: int,
        finish: Finish = Finish.FROZEN,
        num_cuts: int | None = None,
    ) -> None:
        self.inner = inner
        self.requests: list[GenerateRequest] = []
        self._num_tokens = num_tokens
        self._finish = finish
        self._num_cuts_left = num_cuts

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        if self._num_cuts_left == 0:
            async for chunk in self.inner.submit(request):
                yield chunk
            return
        if self._num_cuts_left is not None:
            self._num_cuts_left -= 1
        num = min(self._num_tokens, request.max_new_tokens)
        part = msgspec.structs.replace(request, max_new_tokens=num)
        async for chunk in self.inner.submit(part):
            if chunk.finish is None:
                yield chunk
        yield Chunk(finish=self._finish, reason="cut")

    def caps(self) -> EngineCaps:
        return self.inner.caps()

    async def cancel(self, request_id: str) -> None:
        await self.inner.cancel(request_id)
