"""The gateway over a real engine link and real segment files: an engine's death, a restart."""

import asyncio
import json
from pathlib import Path

import httpx
from gateway_rig import MODEL, scripted, until

from opengyre.gateway.continuation import Continued
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.seams.records import TurnRecord
from opengyre.store.segments import SegmentReader, SegmentWriter
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_server import EngineServer

ANSWER = "a long answer of many words " * 5
BODY = {"messages": [{"role": "user", "content": "go"}], "stream": True}


def test_a_dead_link_in_mid_stream_is_one_unbroken_stream_and_one_durable_record(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        told: list[TurnRecord] = []
        moves: list[Continued] = []
        writer = SegmentWriter(tmp_path)
        events = GatewayEvents(
            on_turn=told.append, on_hold=lambda execution, started: None, on_continued=moves.append
        )
        engine = scripted(lambda text, seed: ANSWER, tokens_per_s=50)
        slow = EngineServer(engine, f"unix:{tmp_path}/slow.sock")
        fast = EngineServer(scripted(lambda text, seed: ANSWER), f"unix:{tmp_path}/fast.sock")
        gateway = Gateway(
            GatewaySettings(max_context_tokens=2000),
            renderer=load_renderer(MODEL),
            recorder=writer,
            events=events,
        )
        async with fast, gateway:
            await slow.__aenter__()
            dying = RemoteEngine(slow.address, name="c1")
            living = RemoteEngine(fast.address, name="s0")
            async with dying, living:
                gateway.connect_engine("c1", dying, 1)
                gateway.connect_engine("s0", living, 4)
                gateway.open_session("e1", "key", "c1", seed=1)
                call = asyncio.create_task(stream(gateway))
                await until(lambda: engine.stats().num_generated_tokens >= 3)
                await asyncio.sleep(0.05)
                await slow.__aexit__(None, None, None)
                await asyncio.sleep(0.1)
                gateway.engine_lost("c1")
                gateway.set_routes([("e1", "s0")])
                text = await call
                await gateway.close_session("e1")
        assert text == ANSWER.strip()
        (turn,) = told
        record = SegmentReader(tmp_path).read(turn.ref)
        await writer.close()
        assert [span.engine for span in turn.spans] == ["c1", "s0"]
        assert len(record.completion_ids) == len(record.logprobs) == turn.spans[1].end
        assert [move.reason for move in moves] == ["engine lost"]

    asyncio.run(main())


async def stream(gateway: Gateway) -> str:
    """The text of one streamed call, which must end with [DONE]."""
    url = f"{gateway.address}/e1/v1/chat/completions"
    text, last = "", ""
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", url, json=BODY, headers={"authorization": "Bearer key"}) as answer,
    ):
        async for line in answer.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                text += delta.get("content") or ""
    assert last == "data: [DONE]"
    return text
