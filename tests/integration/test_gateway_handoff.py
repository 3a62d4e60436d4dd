"""Handoffs through a real gateway, between scripted engines behind real links, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_rig import MODEL, MemoryRecorder, policy, until

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.gateway.continuation import Continued
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.handoffs import Handoff
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.seams.kv import HandoffStage, KVRef
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.engine_server import EngineServer

OFFERED, ACKNOWLEDGED = HandoffStage.OFFERED, HandoffStage.ACKNOWLEDGED
TAKEN_OVER, RELEASED = HandoffStage.TAKEN_OVER, HandoffStage.RELEASED
ANSWER = "a long answer of many words " * 30
DEADLINE_S = 30.0


@dataclass
class Site:
    """A gateway with two engines, c1 and s0, each behind its link; e1 is at c1."""

    gateway: Gateway
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    servers: dict[str, EngineServer] = field(default_factory=dict)
    links: dict[str, RemoteEngine] = field(default_factory=dict)
    told: list[Handoff] = field(default_factory=list)
    moves: list[Continued] = field(default_factory=list)

    async def add(self, stack: AsyncExitStack, name: str, address: str, **config: Any) -> None:
        settings = {"kv_handoff": "on", "kv_handoff_idle": True, **config}
        engine = ScriptedEngine(
            policy(lambda text, seed: ANSWER), ScriptedConfig(name=f"{name}#1", **settings)
        )
        server = await stack.enter_async_context(EngineServer(engine, address))

        def offered(refs: list[KVRef]) -> list[str]:
            return self.gateway.offered_idle(name, 1, refs)

        link = RemoteEngine(server.address, name=name, on_prefixes=offered)
        await stack.enter_async_context(link)
        self.engines[name], self.servers[name], self.links[name] = engine, server, link
        self.gateway.connect_engine(name, link, 1)

    async def leave(self, engine: str, to_engine: str, *executions: str) -> None:
        """What the controller has done when a cell leaves rollout."""
        self.gateway.close_door(engine)
        self.gateway.set_routes([(one, to_engine) for one in executions])
        self.servers[engine].close_door()
        await self.servers[engine].freeze_all(keeps_kv=True)

    async def ask(self, execution: str = "e1", *, after: str = "") -> str:
        """`after`: the answer before, which this call goes on from."""
        url = f"{self.gateway.address}/{execution}/v1/chat/completions"
        messages = [{"role": "user", "content": "go"}]
        if after:
            messages += [
                {"role": "assistant", "content": after},
                {"role": "user", "content": "go on"},
            ]
        body = {"messages": messages}
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(url, json=body, headers={"authorization": "Bearer key"})
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def stages(self, turn: str) -> list[HandoffStage]:
        return [one.stage for one in self.told if one.turn == turn]


@asynccontextmanager
async def open_site(tmp_path: Path, tokens_per_s: float) -> AsyncIterator[Site]:
    recorder = MemoryRecorder()
    told: list[Handoff] = []
    moves: list[Continued] = []
    events = GatewayEvents(
        on_turn=lambda turn: None,
        on_hold=lambda execution, started: None,
        on_continued=moves.append,
        on_handoff=told.append,
    )
    gateway = Gateway(
        GatewaySettings(max_context_tokens=2000),
        renderer=load_renderer(MODEL),
        recorder=recorder,
        events=events,
    )
    site = Site(gateway, told=told, moves=moves)
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        await stack.enter_async_context(gateway)
        await site.add(stack, "c1", f"unix:{tmp_path}/c1.sock", tokens_per_s=tokens_per_s)
        await site.add(stack, "s0", f"unix:{tmp_path}/s0.sock")
        gateway.open_session("e1", "key", "c1", seed=1)
        yield site


def play(
    tmp_path: Path,
    scene: Callable[[Site], Coroutine[Any, Any, None]],
    *,
    tokens_per_s: float = 20.0,
) -> None:
    """`tokens_per_s` is the speed of c1; s0 is as fast as can be."""

    async def main() -> None:
        async with open_site(tmp_path, tokens_per_s) as site:
            await scene(site)

    asyncio.run(main())


def test_a_turn_that_moves_takes_its_prefix_along_and_leaves_nothing_pinned(
    tmp_path: Path,
) -> None:
    async def scene(site: Site) -> None:
        call = asyncio.create_task(site.ask())
        await until(lambda: site.engines["c1"].stats().num_generated_tokens >= 3)
        await site.leave("c1", "s0", "e1")
        assert await call == ANSWER.strip()
        await site.gateway.close_session("e1")
        assert site.stages("e1.t1") == [OFFERED, ACKNOWLEDGED, TAKEN_OVER, RELEASED]
        assert [one.reason for one in site.told] == ["", "", "", "released"]
        assert [one.to_engine for one in site.moves] == ["s0"]
        source, reader = site.engines["c1"].stats(), site.engines["s0"].stats()
        assert (source.num_pinned, reader.num_pinned) == (0, 0)
        assert reader.num_imported_tokens == site.told[0].num_tokens > 3
        assert reader.num_prefill_tokens <= 1

    play(tmp_path, scene)


def test_an_idle_execution_finds_its_prefix_where_it_goes_on(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.gateway.open_session("e2", "key", "c1", seed=2)
        await asyncio.gather(site.ask("e1"), site.ask("e2"))
        await site.gateway.close_session("e2")
        await site.leave("c1", "s0", "e1")
        await until(lambda: len(site.told) == 3)
        assert [one.stage for one in site.told] == [OFFERED, ACKNOWLEDGED, RELEASED]
        assert {(one.execution, one.turn) for one in site.told} == {("e1", "")}
        assert site.engines["c1"].stats().num_pinned == 0, "what nobody claims is kept no longer"
        before = site.engines["s0"].stats()
        assert before.num_imported_tokens == site.told[1].num_tokens > 0

    play(tmp_path, scene, tokens_per_s=0.0)


def test_an_idle_prefix_of_which_the_next_turn_runs_already_is_of_no_use(tmp_path: Path) -> None:
    """It came between the shut door and the freeze, and is computed at the new engine."""

    async def scene(site: Site) -> None:
        answer = await site.ask()
        await site.engines["s0"].pause()
        site.gateway.close_door("c1")
        site.gateway.set_routes([("e1", "s0")])
        call = asyncio.create_task(site.ask(after=answer))
        await until(lambda: site.engines["s0"].stats().num_waiting == 1)
        await site.leave("c1", "s0", "e1")
        assert site.engines["c1"].stats().num_pinned == 0
        await site.engines["s0"].resume()
        assert await call == ANSWER.strip()
        assert site.told == []

    play(tmp_path, scene, tokens_per_s=0.0)


def test_a_session_that_closes_in_mid_move_leaves_nothing_pinned(tmp_path: Path) -> None:
    """Its client was still there; nobody took over."""

    async def scene(site: Site) -> None:
        site.gateway.close_door("s0")
        call = asyncio.create_task(site.ask())
        await until(lambda: site.engines["c1"].stats().num_generated_tokens >= 3)
        await site.leave("c1", "s0", "e1")
        await site.gateway.close_session("e1")
        assert [one.stage for one in site.told] == [RELEASED]
        assert site.engines["c1"].stats().num_pinned == 0
        with pytest.raises(httpx.ReadError):
            await call

    play(tmp_path, scene)


def test_the_death_of_the_source_costs_the_turn_nothing(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        call = asyncio.create_task(site.ask())
        await until(lambda: site.engines["c1"].stats().num_generated_tokens >= 3)
        await site.leave("c1", "s0", "e1")
        await until(lambda: site.told)
        await site.links["c1"].close()
        site.gateway.engine_lost("c1")
        assert await call == ANSWER.strip()
        await site.gateway.close_session("e1")
        assert site.told[-1].stage is RELEASED

    play(tmp_path, scene)


def test_a_release_is_answered_while_the_source_waits_for_it(tmp_path: Path) -> None:
    """The cell is to train: its memory is freed once the last prefix was released."""

    async def scene(site: Site) -> None:
        call = asyncio.create_task(site.ask())
        await until(lambda: site.engines["c1"].stats().num_generated_tokens >= 3)
        site.gateway.close_door("c1")
        site.gateway.set_routes([("e1", "s0")])
        site.servers["c1"].close_door()
        await site.servers["c1"].freeze_all(keeps_kv=True)
        async with asyncio.timeout(5):
            await site.engines["c1"].release()
        assert await call == ANSWER.strip()

    play(tmp_path, scene)
