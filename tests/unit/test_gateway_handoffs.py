"""What a gateway does with a prefix that an engine keeps of a turn: whom it offers it to, what it
believes of what engines say of it, and that it always lets go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from opengyre.gateway.continuation import Continued, Generation, GenerationPlan
from opengyre.gateway.handoffs import Handoff, Handoffs
from opengyre.gateway.routing import NoEngine, Routing
from opengyre.seams.engine import ENGINE_LOST, Chunk, EngineCaps, Finish, GenerateRequest
from opengyre.seams.kv import HandoffStage, KVPlace, KVRef, KVRelease, KVTaken
from opengyre.transport.chunk_stream import ChunkReader, ChunkStream

OFFERED, ACKNOWLEDGED = HandoffStage.OFFERED, HandoffStage.ACKNOWLEDGED
TAKEN_OVER, RELEASED = HandoffStage.TAKEN_OVER, HandoffStage.RELEASED
PLACE = KVPlace(kind="scripted", address="", key="k", num_ranges=2, range_bytes=20)
REF = KVRef(
    ref="c0#1.kv1",
    execution="e1",
    num_tokens=4,
    digest="d",
    version=3,
    model="scripted",
    lease_s=10.0,
    place=PLACE,
)
TAKEN = KVTaken(ref=REF.ref, num_tokens=4, version=3, num_bytes=40, read_s=0.5)
FROZEN = Chunk(finish=Finish.FROZEN, kv=REF)
END = Chunk(finish=Finish.STOP)
HOLD_MAX_S = 0.2


def ids(*tokens: int) -> Chunk:
    return Chunk(ids=list(tokens), logprobs=[-1.0] * len(tokens), policy_version=3)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the condition never held")


class Teller:
    """An engine that answers each request with the next script, and hangs where one ends early."""

    def __init__(self, *scripts: list[Chunk]) -> None:
        self.requests: list[GenerateRequest] = []
        self.log: list[str] = []
        self.taken = TAKEN
        self.answers = asyncio.Event()
        self.answers.set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._scripts = list(scripts)

    def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._chunks(request)

    async def _chunks(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.log.append("submit")
        script = self._scripts.pop(0)
        await self.go_on.wait()
        for chunk in script:
            yield chunk
        await asyncio.Event().wait()

    async def freeze(self, request_id: str, *, keeps_kv: bool = False) -> None:
        self.log.append("freeze")

    async def freeze_all(self, *, keeps_kv: bool = False) -> None:
        self.log.append("freeze")

    async def cancel(self, request_id: str) -> None:
        self.log.append("cancel")

    async def import_kv(self, ref: KVRef) -> KVTaken:
        self.log.append(f"import {ref.ref}")
        await self.answers.wait()
        return self.taken

    async def release_kv(self, ref: str) -> KVRelease:
        self.log.append(f"release {ref}")
        await self.answers.wait()
        return KVRelease.RELEASED

    def caps(self) -> EngineCaps:
        return EngineCaps(
            engine="teller",
            logprob_mode="processed",
            is_resume_exact=True,
            can_export_kv=True,
            weight_path="push",
            context_tokens=1000,
        )


@dataclass
class Desk:
    """A gateway's inside: engines c0, c1, c2, all open; e1 is at c0."""

    engines: list[Teller]
    told: list[Handoff] = field(default_factory=list)
    continued: list[Continued] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.routing = Routing(on_hold=lambda execution, started: None)
        for number, engine in enumerate(self.engines):
            self.routing.connect_engine(f"c{number}", engine, 1)
        self.routing.set_routes({"e1": "c0"})
        self.handoffs = Handoffs(self.routing, on_handoff=self.told.append)

    def generation(self, max_new_tokens: int = 6) -> Generation:
        request = GenerateRequest(
            request_id="t1.a1", execution="e1", prompt_ids=[1, 2], max_new_tokens=max_new_tokens
        )
        return Generation(
            GenerationPlan(
                turn="t1", attempt=1, request=request, num_ids=100, hold_max_s=HOLD_MAX_S
            ),
            routing=self.routing,
            handoffs=self.handoffs,
            on_continued=self.continued.append,
        )

    async def run(self, generation: Generation, on_ids: Callable[[], None]) -> list[int]:
        """All ids; `on_ids` is called after each part of them."""
        made: list[int] = []
        async for some in generation.chunks():
            made += some
            if some:
                on_ids()
        return made

    def route(self, engine: str) -> Callable[[], None]:
        return lambda: self.routing.set_routes({"e1": engine})

    @property
    def stages(self) -> list[tuple[HandoffStage, str]]:
        return [(one.stage, one.to_engine) for one in self.told]


def play(scene: Callable[[Desk], Coroutine[Any, Any, None]], *scripts: list[list[Chunk]]) -> Desk:
    async def main() -> Desk:
        desk = Desk([Teller(*each) for each in scripts])
        async with asyncio.timeout(8), desk.handoffs:
            await scene(desk)
        return desk

    return asyncio.run(main())


def moved(*at_c1: Chunk, ref: KVRef = REF) -> list[list[list[Chunk]]]:
    """The scripts of a turn that c0 cuts after two ids, and that goes on at c1 so."""
    frozen = msgspec.structs.replace(FROZEN, kv=ref)
    return [[[ids(5, 6), frozen]], [[*at_c1]], [[ids(7, 8), END]]]


async def move(desk: Desk) -> None:
    assert await desk.run(desk.generation(), desk.route("c1")) == [5, 6, 7, 8]


def test_what_an_engine_keeps_is_offered_acknowledged_taken_over_and_released() -> None:
    desk = play(move, *moved(Chunk(taken=TAKEN), ids(7), ids(8), END))
    to = "c1"
    assert desk.stages == [(one, to) for one in (OFFERED, ACKNOWLEDGED, TAKEN_OVER, RELEASED)]
    assert [one.num_tokens for one in desk.told] == [4, 4, 4, 4]
    assert (desk.told[1].num_bytes, desk.told[1].read_s) == (40, 0.5)
    assert desk.told[3].reason == "released"
    assert {(one.turn, one.attempt, one.from_engine) for one in desk.told} == {("t1", 1, "c0")}
    assert desk.engines[1].requests[0].kv == REF
    assert desk.engines[1].requests[0].prompt_ids == [1, 2, 5, 6]
    assert desk.engines[0].log == ["submit", f"release {REF.ref}"]
    assert [one.reason for one in desk.continued] == ["frozen"]


def test_what_is_not_read_is_acknowledged_with_the_reason() -> None:
    refused = KVTaken(ref=REF.ref, num_tokens=0, reason="it is of version 3, here is 4")
    desk = play(move, *moved(Chunk(taken=refused), ids(7, 8), END))
    assert [one.stage for one in desk.told] == [OFFERED, ACKNOWLEDGED, RELEASED]
    assert (desk.told[1].num_tokens, desk.told[1].reason) == (0, refused.reason)


def test_a_reader_that_loads_new_weights_before_it_read_needs_no_prefix_any_more() -> None:
    """Its source does not wait for it; the turn goes on when a door is open."""

    async def scene(desk: Desk) -> None:
        async def publish() -> None:
            await until(lambda: desk.engines[1].requests)
            desk.routing.close_door("c1")
            desk.engines[1].go_on.set()
            await until(lambda: desk.told and desk.told[-1].stage is RELEASED)
            desk.routing.open_door("c1")

        desk.engines[1].go_on.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            await move(desk)

    first, (read, *_), _ = moved(END)
    desk = play(scene, first, [[Chunk(finish=Finish.FROZEN)], [ids(7, 8), END]], [read])
    assert desk.stages == [(OFFERED, "c1"), (RELEASED, "c1")]


def test_what_an_engine_worked_before_it_was_frozen_is_no_waiting() -> None:
    """A move before the first id, then a prefill that is longer than a request may be held."""

    async def scene(desk: Desk) -> None:
        async def publish_late() -> None:
            await until(lambda: desk.engines[1].requests)
            await asyncio.sleep(2 * HOLD_MAX_S)
            desk.engines[1].go_on.set()

        desk.engines[1].go_on.clear()
        desk.engines[0].go_on.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_late())
            asked = tasks.create_task(desk.run(desk.generation(), lambda: None))
            await until(lambda: desk.engines[0].requests)
            desk.routing.set_routes({"e1": "c1"})
            desk.engines[0].go_on.set()
        assert asked.result() == [7, 8]

    gone = [Chunk(finish=Finish.FROZEN)]
    play(scene, [gone], [gone, [ids(7, 8), END]], [])


def test_an_engine_that_says_nothing_of_a_prefix_took_nothing_over() -> None:
    desk = play(move, *moved(ids(7, 8), END))
    assert [(one.stage, one.reason) for one in desk.told] == [(OFFERED, ""), (RELEASED, "unused")]


def test_a_reader_that_fails_before_its_first_ids_leaves_the_prefix_to_the_next() -> None:
    async def scene(desk: Desk) -> None:
        async def fail() -> None:
            await until(lambda: desk.engines[1].requests)
            desk.routing.set_routes({"e1": "c2"})
            desk.routing.engine_lost("c1")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            await move(desk)

    scripts = moved(Chunk(taken=TAKEN))
    scripts[2][0].insert(0, Chunk(taken=TAKEN))
    desk = play(scene, *scripts)
    assert desk.stages == [
        *((OFFERED, "c1"), (ACKNOWLEDGED, "c1"), (OFFERED, "c2"), (ACKNOWLEDGED, "c2")),
        *((TAKEN_OVER, "c2"), (RELEASED, "c2")),
    ]
    assert desk.engines[2].requests[0].kv == REF


def test_a_reader_that_is_frozen_itself_keeps_its_own() -> None:
    own = msgspec.structs.replace(REF, ref="c1#1.kv9")
    frozen = msgspec.structs.replace(FROZEN, kv=own)

    async def scene(desk: Desk) -> None:
        async def leave() -> None:
            await until(lambda: desk.engines[1].requests)
            desk.routing.set_routes({"e1": "c2"})

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
            await move(desk)

    desk = play(scene, *moved(Chunk(taken=TAKEN), ids(), frozen))
    assert [(one.ref, one.stage) for one in desk.told if one.ref == REF.ref] == [
        (REF.ref, one) for one in (OFFERED, ACKNOWLEDGED, RELEASED)
    ]
    assert desk.engines[2].requests[0].kv == own
    assert f"release {own.ref}" in desk.engines[1].log


def test_a_reader_that_is_frozen_with_nothing_of_its_own_leaves_the_prefix_to_the_next() -> None:
    async def scene(desk: Desk) -> None:
        async def leave() -> None:
            await until(lambda: desk.engines[1].requests)
            desk.routing.set_routes({"e1": "c2"})

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
            await move(desk)

    scripts = moved(Chunk(taken=TAKEN), Chunk(finish=Finish.FROZEN))
    scripts[2][0].insert(0, Chunk(taken=TAKEN))
    desk = play(scene, *scripts)
    assert desk.engines[2].requests[0].kv == REF
    assert [one.stage for one in desk.told] == [
        *(OFFERED, ACKNOWLEDGED, OFFERED, ACKNOWLEDGED, TAKEN_OVER, RELEASED),
    ]


class FrozenFirst(Teller):
    """Whoever cancels here learns that the request had been frozen before."""

    def submit(self, request: GenerateRequest) -> ChunkReader:
        self.stream = ChunkStream()
        self.stream.put([5], [-1.0], 3)
        return ChunkReader(self.stream, on_abandon=lambda: self.log.append("abandon"))

    async def cancel(self, request_id: str) -> None:
        self.stream.put([6], [-1.0], 3)
        self.stream.end(Finish.FROZEN, policy_version=3, kv=REF)


def test_what_was_frozen_as_it_was_cancelled_is_released() -> None:
    async def main() -> None:
        desk = Desk([FrozenFirst()])
        async with asyncio.timeout(8), desk.handoffs:
            chunks = desk.generation().chunks()
            assert await anext(chunks) == [5]
            await chunks.aclose()
        assert [(one.stage, one.reason) for one in desk.told] == [(RELEASED, "unused")]
        assert desk.engines[0].log == [f"release {REF.ref}"]

    asyncio.run(main())


def test_a_turn_that_ends_before_anyone_took_over_lets_go() -> None:
    async def scene(desk: Desk) -> None:
        chunks = desk.generation().chunks()
        assert await anext(chunks) == [5, 6]
        desk.routing.set_routes({"e1": "c1"})
        assert await anext(chunks) == []
        assert await anext(chunks) == []
        await chunks.aclose()

    desk = play(scene, *moved(Chunk(taken=TAKEN)))
    assert desk.stages == [(OFFERED, "c1"), (ACKNOWLEDGED, "c1"), (RELEASED, "c1")]
    assert "cancel" in desk.engines[1].log


@pytest.mark.parametrize("max_new_tokens", [2, 6])
def test_a_turn_with_nothing_left_offers_nothing(max_new_tokens: int) -> None:
    """Its budget is used up, or the gateway gives up: nobody is there to go on."""

    async def scene(desk: Desk) -> None:
        generation = desk.generation(max_new_tokens)
        with contextlib.suppress(NoEngine):
            await desk.run(generation, lambda: desk.routing.close_door("c0"))

    desk = play(scene, *moved())
    assert [(one.stage, one.reason) for one in desk.told] == [(RELEASED, "unused")]


def test_what_nobody_can_read_now_is_released_at_once() -> None:
    """All engines leave together: their memory is freed once nothing is kept in it."""

    async def scene(desk: Desk) -> None:
        async def open_later() -> None:
            await until(lambda: desk.told)
            desk.routing.open_door("c0")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(open_later())
            made = desk.run(desk.generation(), lambda: desk.routing.close_door("c0"))
            assert await made == [5, 6, 7, 8]

    desk = play(scene, [[ids(5, 6), FROZEN], [ids(7, 8), END]])
    assert [(one.stage, one.reason) for one in desk.told] == [(RELEASED, "unused")]
    assert desk.engines[0].requests[1].kv is None


def test_a_turn_that_turned_back_is_released_first_and_goes_on_without_the_reference() -> None:
    async def scene(desk: Desk) -> None:
        assert await desk.run(desk.generation(), lambda: None) == [5, 6, 7, 8]

    desk = play(scene, [[ids(5, 6), FROZEN], [ids(7, 8), END]])
    assert desk.engines[0].log == ["submit", f"release {REF.ref}", "submit"]
    assert desk.engines[0].requests[1].kv is None
    assert [one.stage for one in desk.told] == [RELEASED]


def test_a_life_that_is_over_is_asked_nothing_and_its_prefix_offered_to_nobody() -> None:
    async def scene(desk: Desk) -> None:
        chunks = desk.generation().chunks()
        assert await anext(chunks) == [5, 6]
        desk.routing.set_routes({"e1": "c1"})
        assert await anext(chunks) == []
        desk.routing.connect_engine("c0", desk.engines[0], 2)
        assert await anext(chunks) == [7, 8]
        await chunks.aclose()

    desk = play(scene, *moved(ids(7, 8), END))
    assert desk.engines[1].requests[0].kv is None
    assert [(one.stage, one.reason) for one in desk.told] == [(RELEASED, ENGINE_LOST)]
    assert desk.engines[0].log == ["submit"]


def test_a_release_without_an_answer_keeps_no_token_waiting_and_ends_with_its_engine() -> None:
    async def scene(desk: Desk) -> None:
        desk.engines[0].answers.clear()
        await move(desk)
        assert desk.told[-1].stage is TAKEN_OVER
        settling = asyncio.create_task(desk.handoffs.settle("e1"))
        await asyncio.sleep(0.01)
        assert not settling.done()
        desk.routing.engine_lost("c0")
        await settling
        assert (desk.told[-1].stage, desk.told[-1].reason) == (RELEASED, ENGINE_LOST)

    play(scene, *moved(Chunk(taken=TAKEN), ids(7, 8), END))


def test_a_release_goes_on_over_the_next_connection_to_the_same_life() -> None:
    async def scene(desk: Desk) -> None:
        desk.engines[0].answers.clear()
        await move(desk)
        await asyncio.sleep(0.01)
        again = Teller()
        desk.routing.reconnect_engine("c0", again)
        await desk.handoffs.settle("e1")
        assert again.log == [f"release {REF.ref}"]
        assert (desk.told[-1].stage, desk.told[-1].reason) == (RELEASED, "released")

    play(scene, *moved(Chunk(taken=TAKEN), ids(7, 8), END))


def test_at_the_end_of_its_lease_a_prefix_is_let_go_whoever_reads_it() -> None:
    short = msgspec.structs.replace(REF, lease_s=0.05)

    async def scene(desk: Desk) -> None:
        chunks = desk.generation().chunks()
        assert await anext(chunks) == [5, 6]
        desk.routing.set_routes({"e1": "c1"})
        assert await anext(chunks) == []
        reading = asyncio.create_task(anext(chunks))
        await until(lambda: desk.told and desk.told[-1].stage is RELEASED)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])

    desk = play(scene, *moved(ref=short))
    assert [one.stage for one in desk.told] == [OFFERED, RELEASED]


LIES_OF_SOURCE: tuple[Chunk, ...] = (
    Chunk(finish=Finish.ERROR, reason="broken", kv=REF),
    msgspec.structs.replace(FROZEN, kv=msgspec.structs.replace(REF, execution="e2")),
    msgspec.structs.replace(FROZEN, kv=msgspec.structs.replace(REF, num_tokens=5)),
    msgspec.structs.replace(FROZEN, kv=msgspec.structs.replace(REF, num_tokens=0)),
    msgspec.structs.replace(FROZEN, kv=msgspec.structs.replace(REF, lease_s=float("nan"))),
)


@pytest.mark.parametrize("lie", LIES_OF_SOURCE)
def test_what_an_engine_cannot_have_kept_is_not_offered(lie: Chunk) -> None:
    desk = play(move, [[ids(5, 6), lie]], [[ids(7, 8), END]])
    assert desk.told == []
    assert desk.engines[1].requests[0].kv is None


LIES_OF_READER: tuple[KVTaken, ...] = (
    msgspec.structs.replace(TAKEN, ref="c9#1.kv1"),
    msgspec.structs.replace(TAKEN, num_tokens=5),
    msgspec.structs.replace(TAKEN, num_tokens=-1),
    msgspec.structs.replace(TAKEN, num_bytes=-1),
    msgspec.structs.replace(TAKEN, read_s=float("nan")),
)


@pytest.mark.parametrize("lie", LIES_OF_READER)
def test_an_acknowledgement_that_cannot_be_ends_the_part(lie: KVTaken) -> None:
    scripts = moved(Chunk(taken=lie), ids(9))
    scripts[1].append([Chunk(taken=TAKEN), ids(7, 8), END])
    desk = play(move, *scripts)
    assert [one.stage for one in desk.told] == [
        *(OFFERED, OFFERED, ACKNOWLEDGED, TAKEN_OVER, RELEASED),
    ]
    assert len(desk.engines[1].requests) == 2


def test_a_prefix_nobody_offered_cannot_be_acknowledged() -> None:
    async def scene(desk: Desk) -> None:
        assert await desk.run(desk.generation(), lambda: None) == [5, 6]

    desk = play(scene, [[Chunk(taken=TAKEN)], [ids(5, 6), END]])
    assert desk.told == []


def test_an_idle_prefix_is_imported_where_its_execution_goes_on_and_released() -> None:
    async def scene(desk: Desk) -> None:
        desk.routing.set_routes({"e1": "c1"})
        source = desk.routing.seat_of("c0", 1)
        assert source is not None
        assert desk.handoffs.hand_over_idle(REF, source)
        assert not desk.handoffs.hand_over_idle(REF, source)
        await until(lambda: len(desk.told) == 3)

    desk = play(scene, [], [])
    assert desk.stages == [(OFFERED, "c1"), (ACKNOWLEDGED, "c1"), (RELEASED, "c1")]
    assert {one.turn for one in desk.told} == {""}
    assert (desk.engines[1].log, desk.engines[0].log) == (
        [f"import {REF.ref}"],
        [f"release {REF.ref}"],
    )


def test_an_idle_prefix_that_could_not_be_read_was_for_nothing() -> None:
    async def scene(desk: Desk) -> None:
        desk.routing.set_routes({"e1": "c1"})
        desk.engines[1].taken = KVTaken(ref=REF.ref, num_tokens=0, reason="its lease ended")
        source = desk.routing.seat_of("c0", 1)
        assert source is not None
        assert desk.handoffs.hand_over_idle(REF, source)
        await until(lambda: len(desk.told) == 3)

    desk = play(scene, [], [])
    assert [(one.stage, one.reason) for one in desk.told] == [
        *((OFFERED, ""), (ACKNOWLEDGED, "its lease ended"), (RELEASED, "unused")),
    ]


@pytest.mark.parametrize("where", ["c0", "c1"])
def test_an_idle_prefix_that_serves_nobody_is_not_claimed(where: str) -> None:
    """Its execution goes on where it is, or where the door is closed: its engine is told so."""

    async def scene(desk: Desk) -> None:
        desk.routing.set_routes({"e1": where})
        desk.routing.close_door("c1")
        source = desk.routing.seat_of("c0", 1)
        assert source is not None
        assert not desk.handoffs.hand_over_idle(REF, source)

    desk = play(scene, [], [])
    assert desk.told == []
    assert (desk.engines[0].log, desk.engines[1].log) == ([], [])


def test_leaving_the_gateway_lets_go_of_all() -> None:
    async def scene(desk: Desk) -> None:
        source = desk.routing.seat_of("c0", 1)
        assert source is not None
        for number in range(3):
            ref = msgspec.structs.replace(REF, ref=f"kv{number}")
            assert desk.handoffs.keep(ref, source, turn="t1", attempt=1)

    desk = play(scene, [])
    assert sorted(desk.engines[0].log) == ["release kv0", "release kv1", "release kv2"]
    assert [one.stage for one in desk.told] == [RELEASED] * 3


def test_at_most_four_idle_prefixes_are_imported_at_once() -> None:
    async def scene(desk: Desk) -> None:
        desk.routing.set_routes({"e1": "c1"})
        source = desk.routing.seat_of("c0", 1)
        assert source is not None
        desk.engines[1].answers.clear()
        for number in range(6):
            ref = msgspec.structs.replace(REF, ref=f"kv{number}")
            assert desk.handoffs.hand_over_idle(ref, source)
        await until(lambda: len(desk.told) == 4)
        await asyncio.sleep(0.01)
        assert [one.stage for one in desk.told] == [OFFERED] * 4
        desk.engines[1].answers.set()
        await until(lambda: len(desk.told) == 2 * 6)
        assert sum(one.stage is OFFERED for one in desk.told) == 6

    play(scene, [], [])
