"""Long random orders over three scripted engines: what is told stays true, nothing is left.

Each request is a line of streams that continue each other. Its tokens are always a beginning of
the one answer, each logprob is of the version of its chunk, and a prefix is only taken by an engine
of its version.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_under_test import prompt_of
from handoff_rig import SCRIPTED, Heard, ask, counting_answer, make_engine, nothing_left, publish
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from opengyre.engines.compute import ComputeThread
from opengyre.engines.scripted import pseudo_logprob
from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.seams.kv import KVRef, KVRelease

NUM_ENGINES = 3
NUM_TOKENS = 60
LEASE_S = 0.06
engines = st.integers(0, NUM_ENGINES - 1)
lines = st.integers(0, 3)


@dataclass(slots=True, kw_only=True)
class Line:
    """One request, wherever it runs; `at` is the engine of its running stream, `-1`: none."""

    number: int
    prompt: list[int]
    at: int = -1
    life: int = 0
    part: int = 0
    ids: list[int] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    asked: GenerateRequest | None = None
    stream: Any = None
    ref: KVRef | None = None

    @property
    def is_over(self) -> bool:
        return len(self.ids) >= NUM_TOKENS


def has_running(machine: "HandoffMachine") -> bool:
    return any(one.at >= 0 for one in machine.lines)


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.compute = ComputeThread()
        self.engines: list[Any] = []
        self.lives = [0] * NUM_ENGINES
        self.lines: list[Line] = []
        self.refs: list[tuple[int, int, KVRef]] = []

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def new_engine(self, at: int, version: int = 0) -> Any:
        return make_engine(
            SCRIPTED,
            self.compute,
            name=f"e{at}#{self.lives[at]}",
            kv_lease_s=LEASE_S,
            kv_handoff_idle=True,
            tokens_per_s=600.0,
            version=version,
        )

    @initialize()
    def open(self) -> None:
        async def make() -> list[Any]:
            return [self.new_engine(at) for at in range(NUM_ENGINES)]

        self.engines = self.run(make())
        for number in range(3):
            self.submit(number, number)

    @rule(at=engines, which=lines)
    def submit(self, at: int, which: int) -> None:
        """A new request, or the rest of one, with the reference it has."""
        while len(self.lines) <= which:
            number = len(self.lines)
            self.lines.append(Line(number=number, prompt=prompt_of(10 + number)))
        line = self.lines[which]
        if line.at >= 0 or line.is_over:
            return
        line.part, line.heard, line.at, line.life = line.part + 1, Heard(), at, self.lives[at]
        line.asked = ask(
            line.prompt + line.ids,
            NUM_TOKENS - len(line.ids),
            name=f"r{which}.{line.part}",
            execution=f"e{which}",
            temperature=1.0,
            seed=which,
            kv=line.ref,
        )
        line.ref = None
        line.stream = self.run(_submitted(self.engines[at], line.asked))

    def running(self, which: int) -> Line:
        among = [one for one in self.lines if one.at >= 0]
        return among[which % len(among)]

    @precondition(has_running)
    @rule(which=lines)
    def read(self, which: int) -> None:
        self.run(self._read_one(self.running(which)))

    async def _read_one(self, line: Line) -> None:
        line.heard.note(await anext(line.stream))
        if line.heard.end is not None:
            self._end(line)

    async def _read_all(self, line: Line) -> None:
        while line.at >= 0:
            await self._read_one(line)

    def _end(self, line: Line) -> None:
        """The stream gave all it will: its words are compared with what must be."""
        heard, asked, at = line.heard, line.asked, line.at
        assert asked is not None
        assert heard.end is not None
        answer = counting_answer(line.prompt, 0)[:NUM_TOKENS]
        assert line.ids + heard.ids == answer[: len(line.ids) + len(heard.ids)]
        start = len(asked.prompt_ids)
        assert len(heard.versions) <= 1
        for version in heard.versions:
            expected = [
                pseudo_logprob(asked.seed, start + n, version) for n in range(len(heard.ids))
            ]
            assert heard.logprobs == pytest.approx(expected)
        if asked.kv is not None and heard.ids:
            assert heard.taken is not None
            is_same = heard.versions == {asked.kv.version}
            assert heard.taken.num_tokens in ((asked.kv.num_tokens, 0) if is_same else (0,))
        line.ids += heard.ids
        line.ref = heard.end.kv
        if line.ref is not None:
            assert line.ref.num_tokens <= len(line.prompt) + len(line.ids)
            self.refs.append((at, line.life, line.ref))
        line.at = -1

    @precondition(has_running)
    @rule(which=lines, keeps_kv=st.booleans())
    def freeze(self, which: int, keeps_kv: bool) -> None:
        line = self.running(which)
        assert line.asked is not None
        self.run(self.engines[line.at].freeze(line.asked.request_id, keeps_kv=keeps_kv))
        self.run(self._read_all(line))
        assert line.heard.finish in (Finish.FROZEN, Finish.LENGTH)
        assert keeps_kv or line.ref is None

    @rule(at=engines, keeps_kv=st.booleans())
    def freeze_all(self, at: int, keeps_kv: bool) -> None:
        self.run(self.engines[at].freeze_all(keeps_kv=keeps_kv))
        self.read_engine(at)

    def read_engine(self, at: int) -> None:
        for line in self.lines:
            if line.at == at:
                self.run(self._read_all(line))

    @precondition(has_running)
    @rule(which=lines, to=engines)
    def hand_over(self, which: int, to: int) -> None:
        line = self.running(which)
        self.run(self._read_one(line))
        if line.at >= 0:
            assert line.asked is not None
            self.run(self.engines[line.at].freeze(line.asked.request_id, keeps_kv=True))
            self.run(self._read_all(line))
        self.submit(to, line.number)

    @precondition(has_running)
    @rule(which=lines)
    def cancel(self, which: int) -> None:
        line = self.running(which)
        assert line.asked is not None
        self.run(self.engines[line.at].cancel(line.asked.request_id))
        self.run(self._read_all(line))
        assert line.heard.finish in (Finish.CANCELLED, Finish.LENGTH)
        assert line.ref is None

    @precondition(lambda self: self.refs)
    @rule(number=st.integers(0, 200))
    def release(self, number: int) -> None:
        at, life, ref = self.refs.pop(number % len(self.refs))
        first, again = (self.run(self.engines[at].release_kv(ref.ref)) for _ in range(2))
        assert again is KVRelease.UNKNOWN
        assert (first is KVRelease.UNKNOWN) is (life != self.lives[at])

    def running_at(self, at: int) -> set[str]:
        """Executions that run there for certain: a stream that was not read may have ended."""
        unread = [f"e{line.number}" for line in self.lines if line.at == at]
        stats = self.engines[at].stats()
        return set(unread if stats.num_running + stats.num_waiting == len(unread) else [])

    @rule(at=engines, to=engines)
    def hand_over_idle(self, at: int, to: int) -> None:
        refs = self.run(self.engines[at].export_kv())
        running = self.running_at(at)
        for ref in refs:
            assert ref.execution not in running
            assert len(ref.ids) == ref.num_tokens
            taken = self.run(self.engines[to].import_kv(ref))
            is_same = ref.version == self.engines[to].stats().version
            assert taken.num_tokens in ((ref.num_tokens, 0) if is_same else (0,))
            self.refs.append((at, self.lives[at], ref))

    @rule(at=engines, is_everywhere=st.booleans())
    def publish(self, at: int, is_everywhere: bool) -> None:
        version = 1 + max(one.stats().version for one in self.engines)
        for place in range(NUM_ENGINES) if is_everywhere else [at]:
            engine = self.engines[place]
            self.freeze_all(place, keeps_kv=False)
            self.run(publish(engine, SCRIPTED, version))
            assert engine.stats().num_pinned == 0

    @rule(at=engines)
    def die(self, at: int) -> None:
        """Another life takes its place. What ran there is read as far as it was sent."""
        engine = self.engines[at]
        self.run(engine.freeze_all(keeps_kv=True))
        self.read_engine(at)
        self.run(engine.pause())
        self.lives[at] += 1

        async def make() -> Any:
            return self.new_engine(at, engine.stats().version)

        self.engines[at] = self.run(make())

    @rule(part=st.sampled_from([0.3, 1.2]))
    def wait(self, part: float) -> None:
        self.run(asyncio.sleep(LEASE_S * part))

    @invariant()
    def pins_are_known(self) -> None:
        for at, engine in enumerate(self.engines):
            known = [one for place, life, one in self.refs if (place, life) == (at, self.lives[at])]
            unread = [one for one in self.lines if one.at == at]
            assert engine.stats().num_pinned <= len(known) + len(unread)
            assert not engine.stats().failure

    def teardown(self) -> None:
        try:
            for at, engine in enumerate(self.engines):
                self.run(engine.freeze_all(keeps_kv=True))
                self.read_engine(at)
            for line in self.lines:
                if not line.is_over:
                    self.submit(line.number % NUM_ENGINES, line.number)
                    self.run(self._read_all(line))
                    assert line.ids == counting_answer(line.prompt, 0)[:NUM_TOKENS]
            for engine in self.engines:
                self.run(nothing_left(engine, within_s=5))
                self.run(engine.pause())
        finally:
            self.compute.close()
            self.loop.close()


async def _submitted(engine: Any, asked: GenerateRequest) -> Any:
    return engine.submit(asked)


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=20, stateful_step_count=60, deadline=None)
