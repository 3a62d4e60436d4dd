"""What every numbered case stands on: a gateway, engines that are watched, harnesses that count.

`open_case` checks at its end what holds in every case: records have equal lengths, each prompt and
completion is what an engine received and returned, the account of tokens is balanced, and some
tokens are trained.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from cases_speakers import (
    BASH,
    SPEAKERS,
    Answered,
    Entry,
    Event,
    Json,
    Reply,
    Results,
    Said,
    Speaker,
    ToolCall,
    ToolSpec,
)
from gateway_rig import TOKENIZER, Rig, open_rig, scripted
from msgspec.structs import replace

from opengyre.engines.scripted import ScriptedEngine
from opengyre.seams.engine import Chunk, EngineCaps, Finish, GenerateRequest
from opengyre.seams.records import TokenRecord, TurnRecord
from opengyre.store.trees import tree_of
from opengyre.trajectory.account import TokenAccount
from opengyre.trajectory.selection import Path, SelectionSettings, select
from opengyre.trajectory.tree import line_ids
from opengyre.trajectory.turns import TRAINED_ROLES, Role


class Line:
    """A path as tests look at it: `turns` are those it trains, `versions` of its last one's ids."""

    def __init__(self, path: Path) -> None:
        trained = [
            piece.node
            for piece in path.pieces
            if any(piece.begin <= begin < piece.end for begin, _ in path.trained)
        ]
        self.first = trained[0].index
        self.turns = tuple(node.turn for node in trained)
        self.token_ids = line_ids(path.leaf).tolist()
        self.num_trained = path.num_trained_tokens
        self.versions = [
            span.version for span in path.leaf.spans for _ in range(span.start, span.end)
        ]


EACH_PROTOCOL = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda one: str(one.name))
EACH_WAY = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
CONTEXT_TOKENS = 100_000
NEVER = 10**9

THOUGHT = "I look first.\nThen é 😀."
WORDS = "Wörter und 😀 zuerst."
ARGUMENTS = '{"command": "cat log/10 é"}'
CALL = f'<tool_call>\n{{"name": "bash", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{WORDS}\n\n{CALL}"
SAID = (WORDS, THOUGHT, (("bash", ARGUMENTS),), "calls")
"""What a client must get of ANSWER."""


class Witness:
    """The engine behind it, with everything that it was asked and that it gave, up to a cancel.

    `cut_at`: the first submission ends there, after so many tokens, as `how` says: frozen, an
    error, "" for an end without a word, or "silent" for ever. `on_cut` is called then.
    `stalls`: the submission of that number, from 0, gives so many tokens and then nothing more.
    """

    def __init__(
        self,
        inner: ScriptedEngine,
        *,
        cut_at: int | None = None,
        how: Finish | str = Finish.FROZEN,
        on_cut: Callable[[], None] = lambda: None,
        stalls: dict[int, int] | None = None,
    ) -> None:
        self.inner = inner
        self._stalls = stalls or {}
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.given: dict[str, list[Chunk]] = {}
        self.num_given = 0
        self.waited: dict[int, asyncio.Event] = {}
        self._cut_at = cut_at
        self._how = how
        self.on_cut = on_cut

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        given = self.given[request.request_id] = []
        cut_at, self._cut_at = self._cut_at, None
        num_left = request.max_new_tokens if cut_at is None else cut_at
        num_before_stall = self._stalls.get(len(self.requests) - 1, NEVER)
        async for chunk in self.inner.submit(request):
            if cut_at is not None and num_left <= 0:
                break
            if num_before_stall <= 0:
                await asyncio.Event().wait()
            num_left -= len(chunk.ids)
            num_before_stall -= len(chunk.ids)
            is_last = chunk.finish is not None
            told = chunk if cut_at is None else replace(chunk, finish=None)
            if request.request_id not in self.cancelled:
                given.append(told)
            self._count(chunk)
            yield told
            if is_last and cut_at is None:
                return
        await self.inner.cancel(request.request_id)
        self.on_cut()
        if isinstance(self._how, Finish):
            yield Chunk(finish=self._how, reason="cut")
        elif self._how == "silent":
            await asyncio.Event().wait()

    async def has_given(self, num_tokens: int) -> None:
        """Return as soon as so many tokens came from it, all requests together."""
        if self.num_given < num_tokens:
            await asyncio.wait_for(self.waited.setdefault(num_tokens, asyncio.Event()).wait(), 20)

    def _count(self, chunk: Chunk) -> None:
        self.num_given += len(chunk.ids)
        for wanted, event in self.waited.items():
            if self.num_given >= wanted:
                event.set()

    async def freeze(self, request_id: str) -> None:
        await self.inner.freeze(request_id)

    async def freeze_all(self) -> None:
        await self.inner.freeze_all()

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        await self.inner.cancel(request_id)

    def caps(self) -> EngineCaps:
        return self.inner.caps()


def witness(
    respond_text: Callable[[str, int], str],
    *,
    cut_at: int | None = None,
    how: Finish | str = Finish.FROZEN,
    stalls: dict[int, int] | None = None,
    **config: float,
) -> Witness:
    engine = scripted(respond_text, **{"context_tokens": CONTEXT_TOKENS, **config})
    return Witness(engine, cut_at=cut_at, how=how, stalls=stalls)


def new_client(timeout_s: float = 20.0) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=timeout_s, verify=False, limits=httpx.Limits())


def by_turn(answers: list[str]) -> Callable[[str, int], str]:
    """The k-th answer to a prompt that holds k - 1 answers; the last one for ever."""

    def respond(text: str, seed: int) -> str:
        number = text.count("<|im_start|>assistant\n") - 1
        return answers[min(number, len(answers) - 1)]

    return respond


def num_tokens_of(answer: str) -> int:
    """With the id that ends it."""
    return len(TOKENIZER.encode(answer, add_special_tokens=False).ids) + 1


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


@dataclass(kw_only=True)
class Harness:
    """One agent that speaks one protocol. It makes a request only when it is asked to."""

    rig: Rig
    speaker: Speaker
    client: httpx.AsyncClient
    execution: str = "e000001"
    key: str = "key-1"
    prefix: str = "v1"
    tools: tuple[ToolSpec, ...] = (BASH,)
    history: list[Entry] = field(default_factory=lambda: [Said(role="user", text="Do it.")])
    extra: Json = field(default_factory=dict)
    extra_headers: dict[str, str] = field(default_factory=dict)
    num_requests: int = 0
    num_comments: int = 0
    raw_bodies: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        parts = [self.rig.gateway.address, self.execution, self.prefix, self.speaker.operation]
        return "/".join(part for part in parts if part)

    @property
    def headers(self) -> dict[str, str]:
        is_claude = self.speaker.name == "anthropic"
        carrier = {"x-api-key": self.key} if is_claude else {"authorization": f"Bearer {self.key}"}
        return {"content-type": "application/json", **carrier, **self.extra_headers}

    def body(self, *, stream: bool, **more: Any) -> Json:
        body = self.speaker.body(self.history, stream=stream, tools=self.tools)
        return {**body, **self.extra, **more}

    async def ask(self, *, stream: bool, **more: Any) -> Reply:
        """One request with the history; its answer must be whole."""
        return await self.send(self.body(stream=stream, **more))

    async def send(self, body: Json, *, headers: dict[str, str] | None = None) -> Reply:
        raw = json.dumps(body).encode()
        self.num_requests += 1
        self.raw_bodies.append(raw)
        all_headers = self.headers | (headers or {})
        answer = await self.client.post(self.url, headers=all_headers, content=raw)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            assert answer.headers["content-type"] == "application/json"
            return self.speaker.whole(answer.json())
        assert answer.headers["content-type"].startswith("text/event-stream")
        events, num_comments = read_events(answer.text)
        self.num_comments += num_comments
        return self.speaker.streamed(events)

    async def leave(
        self, body: Json, *, after: bytes, headers: dict[str, str] | None = None
    ) -> bytes:
        """A streamed request whose client goes away once it has seen `after`; what it saw."""
        self.num_requests += 1
        seen = b""
        all_headers = self.headers | (headers or {})
        async with new_client() as client:
            request = client.build_request("POST", self.url, headers=all_headers, json=body)
            answer = await client.send(request, stream=True)
            async for part in answer.aiter_raw():
                seen += part
                if after in seen:
                    return seen
        raise AssertionError(f"never came: {after!r} in {seen[-200:]!r}")

    def keep(self, reply: Reply, form: Any, *results: str) -> None:
        """Go on from `form` of the reply and, in its calls' order, their results."""
        self.history.append(Answered(form=form))
        pairs = tuple(zip([call.call_id for call in reply.calls], results, strict=True))
        if pairs:
            self.history.append(Results(pairs=pairs))
        else:
            self.history.append(Said(role="user", text="Go on."))

    async def turn(self, *, stream: bool, as_sent: bool = False) -> Reply:
        """Ask, and go on as the program of this protocol does, or with the answer verbatim."""
        reply = await self.ask(stream=stream)
        sent = reply.sent_back if as_sent else self.speaker.as_harness(reply.sent_back)
        self.keep(reply, sent, *(f"result of {k}" for k in range(len(reply.calls))))
        return reply


def read_events(text: str) -> tuple[list[Event], int]:
    """(events, how many comments). Every block ends; nothing else is in the stream."""
    assert text.endswith("\n\n"), "a torn event at the end"
    events: list[Event] = []
    num_comments = 0
    for block in text[:-2].split("\n\n"):
        name, data = "", None
        for line in block.split("\n"):
            if line.startswith(":"):
                num_comments += 1
            elif line.startswith("event: "):
                name = line.removeprefix("event: ")
            else:
                assert line.startswith("data: "), line
                data = line.removeprefix("data: ")
        if data is not None:
            events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events, num_comments


@dataclass(kw_only=True)
class Case:
    rig: Rig
    engines: dict[str, Any]
    client: httpx.AsyncClient
    executions: list[str] = field(default_factory=lambda: ["e000001"])

    def harness(self, speaker: Speaker, **more: Any) -> Harness:
        return Harness(rig=self.rig, speaker=speaker, client=self.client, **more)

    def open(self, execution: str, engine_id: str) -> dict[str, str]:
        """Another execution; what a harness of it needs."""
        key = f"key-{execution}"
        self.rig.gateway.open_session(execution, key, engine_id, seed=7)
        self.executions.append(execution)
        return {"execution": execution, "key": key}

    async def close(self) -> list[TurnRecord]:
        """Close every session; then everything was told, in this order."""
        for execution in self.executions:
            await self.rig.gateway.close_session(execution)
        return self.rig.told

    def records(self, execution: str = "e000001") -> list[TokenRecord]:
        return [one for one in self.rig.recorder.records if one.header.execution == execution]

    def full_prompt(self, record: TokenRecord) -> list[int]:
        """A turn's prompt, restored from records alone."""
        header = record.header
        kept: list[int] = []
        if header.parent:
            mine = self.records(header.execution)
            parents = [one for one in mine if one.header.turn == header.parent]
            parent = next(one for one in parents if one.header.is_committed)
            kept = (self.full_prompt(parent) + parent.completion_ids)[: header.num_kept_tokens]
        return kept + record.new_prompt_ids

    def paths(
        self,
        execution: str = "e000001",
        trained_roles: tuple[Role, ...] = TRAINED_ROLES,
    ) -> tuple[list[Line], TokenAccount]:
        """All paths, in the order of the first turn that each trains."""
        selection = select(
            tree_of(self.records(execution)),
            settings=SelectionSettings(max_paths=0, trained_roles=trained_roles),
            rng=np.random.default_rng(0),
        )
        return sorted(map(Line, selection.paths), key=lambda one: one.first), selection.account

    def check(self) -> None:
        for record in self.rig.recorder.records:
            self._check_record(record)
        for execution in self.executions:
            paths, account = self.paths(execution)
            assert account.is_balanced, (execution, account)
            assert account.trained == sum(path.num_trained for path in paths)
            assert account.trained > 0, f"{execution} trains nothing"
            sampled = sum(len(one.completion_ids) for one in self.records(execution))
            assert account.sampled == sampled

    def _check_record(self, record: TokenRecord) -> None:
        """Its ids are what engines received and returned, in order."""
        header = record.header
        assert len(record.logprobs) == len(record.completion_ids) == header.num_completion_tokens
        prompt, at = self.full_prompt(record), 0
        for span in header.spans:
            assert span.start == at
            assert span.end > span.start
            at = span.end
        assert at == len(record.completion_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        for asked, chunks in self._parts(f"{header.turn}.a{header.attempt}."):
            assert asked.prompt_ids == prompt + ids, header.turn
            for chunk in chunks:
                ids += chunk.ids
                logprobs += chunk.logprobs
        if header.is_committed:
            assert record.completion_ids == ids, header.turn
        assert ids[: len(record.completion_ids)] == record.completion_ids, header.turn
        assert logprobs[: len(record.logprobs)] == record.logprobs, header.turn

    def _parts(self, name: str) -> list[tuple[GenerateRequest, list[Chunk]]]:
        """Submissions of an attempt in the order they were made."""
        found = [
            (asked, one.given[asked.request_id])
            for one in self.engines.values()
            for asked in one.requests
            if asked.request_id.startswith(name)
        ]
        return sorted(found, key=lambda part: int(part[0].request_id.rpartition(".p")[2]))


@asynccontextmanager
async def open_case(engines: dict[str, Any], **settings: Any) -> AsyncIterator[Case]:
    """Settings are those of the gateway."""
    chosen = {"max_context_tokens": CONTEXT_TOKENS, **settings}
    async with (
        open_rig(engines, **chosen) as rig,
        httpx.AsyncClient(timeout=100.0, verify=False) as client,
    ):
        case = Case(rig=rig, engines=engines, client=client)
        yield case
        await case.close()
        case.check()


def tool_calls_of(*arguments: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "bash", "arguments": {one}}}\n</tool_call>' for one in arguments
    )


def arguments_of(reply: Reply) -> list[str]:
    return [call.arguments for call in reply.calls]


def renamed(calls: tuple[ToolCall, ...], form: Any, how: Callable[[str], str]) -> Any:
    """`form` with the ids of its calls made by `how`, wherever they stand."""
    text = json.dumps(form)
    for call in calls:
        text = text.replace(json.dumps(call.call_id), json.dumps(how(call.call_id)))
    return json.loads(text)
