"""A client that opens many streams at once and notes when each letter came.

Owns: asking, checking that an answer is whole. Must not know: which gateway stands between.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

import msgspec

from opengyre.engines.http_stream import EventLines, HttpPool, parse_origin
from opengyre.engines.letters import letters
from opengyre.seams.errors import BoundaryError

REQUEST_DEADLINE_S = 30.0
MAX_REFUSED = 20
RETRY_S = 0.5


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where chat is asked for: `{url}{path}`; `{session}` in the path is filled in."""

    url: str
    path: str
    key: str = ""


@dataclass(slots=True, kw_only=True)
class Heard:
    """One answer. `arrivals`: (seconds, letters so far); `failure` "" if its end came.
    `num_refused`: calls before it that gave no token."""

    tag: str
    sent_s: float = 0.0
    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    failure: str = "no end"
    num_refused: int = 0

    def is_whole(self, num_tokens: int) -> bool:
        """Every letter, once and in order, and a proper end."""
        if self.failure or len(self.text) != num_tokens:
            return False
        return self.text == letters("abcdefghijklmnopqrstuvwxyz".index(self.text[0]), num_tokens)


class _Listener:
    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.ended = asyncio.Event()
        self._lines = EventLines()

    def on_body(self, status: int, data: bytes) -> None:
        now_s = time.monotonic()
        if status != 200:
            self.heard.failure = f"HTTP {status}"
            return
        for event in self._lines.feed(data):
            if event == b"[DONE]":
                self.heard.failure = ""
            else:
                self._take(event, now_s)

    def _take(self, event: bytes, now_s: float) -> None:
        heard = self.heard
        choices = _decode(event).choices
        text = choices[0].delta.content if choices else None
        if text:
            heard.text += text
            heard.arrivals.append((now_s, len(heard.text)))

    def on_end(self, status: int, failure: str) -> None:
        self.heard.failure = failure or self.heard.failure
        self.ended.set()


class Client:
    """Asks one target; use one for a measurement and close it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = HttpPool(parse_origin(target.url, api_key=target.key))

    def close(self) -> None:
        self._pool.close()

    async def ask(self, session: str, tag: str) -> Heard:
        """One streamed answer; a failure is in it."""
        heard = Heard(tag=tag)
        listener = _Listener(heard)
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": tag}],
            "stream": True,
        }
        path = self._target.path.format(session=session)
        request = self._pool.request("POST", path, msgspec.json.encode(body))
        try:
            connection = await self._pool.connection()
        except BoundaryError as error:
            heard.failure = error.reason
            return heard
        heard.sent_s = time.monotonic()
        connection.send(request, listener)
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                await listener.ended.wait()
        except TimeoutError:
            heard.failure = "too late"
            connection.close()
        return heard


async def closed_loop(
    target: Target, *, num_sessions: int, duration_s: float, think_s: float = 0.0
) -> list[Heard]:
    """Each session asks again when it was answered and has thought (up to `think_s`, drawn by its
    number), until the time is over."""
    client = Client(target)
    until_s = time.monotonic() + duration_s
    heard: list[Heard] = []

    async def session(number: int) -> None:
        turn = 0
        thoughts = random.Random(number)
        while time.monotonic() < until_s:
            turn += 1
            await asyncio.sleep(think_s * thoughts.random())
            heard.append(await client.ask(f"s{number}", f"tag {number}.{turn};"))

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_sessions):
            tasks.create_task(session(number))
    client.close()
    return heard


async def streams(target: Target, *, num_streams: int, num_at_once: int) -> list[Heard]:
    """So many streams in all, each of a session of its own. A call that was refused before its
    first token is made again, as agents do; a stream that broke is not."""
    client = Client(target)
    numbers = iter(range(num_streams))
    heard: list[Heard] = []

    async def insist(number: int) -> Heard:
        for num_refused in range(MAX_REFUSED):
            one = await client.ask(f"s{number}", f"tag {number};")
            one.num_refused = num_refused
            if one.text or not one.failure:
                break
            await asyncio.sleep(RETRY_S)
        return one

    async def one_after_another() -> None:
        for number in numbers:
            heard.append(await insist(number))  # noqa: PERF401

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_at_once):
            tasks.create_task(one_after_another())
    client.close()
    return heard
