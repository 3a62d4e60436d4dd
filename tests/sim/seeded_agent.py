"""An agent program of a seeded world: it talks HTTP to the gateway and checks every token.

Owns: one conversation, its own faults (it leaves and tries again, crashes, hangs). Must not
know: engines, moves, publications. Invariant: whatever it did not do itself and that is not the
answer it expects is told to `wrong`; a call that was cut because its gateway was killed is tried
again.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.sim.seeded_policy import text_of_answer

MAX_ATTEMPTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Rates are for each attempt of a call, or for each turn."""

    max_turns: int = 3
    tool_s: float = 2.0
    leave_rate: float = 0.0
    crash_rate: float = 0.0
    hang_rate: float = 0.0
    side_call_rate: float = 0.0
    renew_rate: float = 0.0


class Crash(Exception):
    """The agent ends as a program that failed."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str
    finish: str


class Left(Exception):
    """We closed the connection ourselves."""


class Agent:
    """`wrong(words)` is told of each broken promise. `was_killed(place, since_s)`: was the gateway
    there killed?"""

    def __init__(
        self,
        env: dict[str, str],
        *,
        execution: str,
        habits: Habits,
        rng: Random,
        wrong: Callable[[str], None],
        was_killed: Callable[[str, float], bool],
    ) -> None:
        url = urlsplit(env["OPENAI_BASE_URL"])
        self._place = (url.hostname, url.port)
        self._path = url.path + "/chat/completions"
        self._key = env["OPENAI_API_KEY"]
        self._execution = execution
        self._habits = habits
        self._rng = rng
        self._wrong = wrong
        self._was_killed = was_killed
        self._messages: list[dict[str, str]] = []
        self.num_answers = 0

    async def play(self) -> None:
        """The whole conversation. Raises Crash."""
        for turn in range(self._rng.randint(1, self._habits.max_turns)):
            await asyncio.sleep(self._rng.expovariate(1 / self._habits.tool_s))
            if self._rng.random() < self._habits.crash_rate:
                raise Crash
            if self._rng.random() < self._habits.hang_rate:
                await asyncio.Event().wait()
            if self._habits.renew_rate and self._rng.random() < self._habits.renew_rate:
                self._renew()
            if self._rng.random() < self._habits.side_call_rate:
                async with asyncio.TaskGroup() as calls:
                    calls.create_task(self._turn(f"{self._execution} side {turn}", is_side=True))
                    calls.create_task(self._turn(f"{self._execution} turn {turn}"))
            else:
                await self._turn(f"{self._execution} turn {turn}")

    def _renew(self) -> None:
        """Begin a conversation anew, or go on from an earlier answer: branches of the tree."""
        self._messages = self._messages[: self._rng.choice([0, -2])]

    async def _turn(self, message: str, *, is_side: bool = False) -> None:
        messages = [] if is_side else self._messages
        messages.append({"role": "user", "content": message})
        most = self._rng.choice([64, 64, self._rng.randint(1, 6)])
        body = {
            "model": "policy",
            "messages": messages,
            "max_tokens": most,
            "stream": self._rng.random() < 0.5,
        }
        text, is_cut = text_of_answer(message, most)
        reply = await self._complete(body)
        expected = Reply(200, text, "length" if is_cut else "stop")
        if reply != expected:
            self._wrong(f"{message!r}: got {reply}, expected {expected}")
        self.num_answers += 1
        messages.append({"role": "assistant", "content": reply.text})

    async def _complete(self, body: dict[str, Any]) -> Reply:
        """The answer; a call that we left ourselves is tried again."""
        for attempt in range(MAX_ATTEMPTS):
            is_leaving = attempt < 3 and self._rng.random() < self._habits.leave_rate
            patience_s = self._rng.expovariate(1.0) if is_leaving else None
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(patience_s):
                    reply = await self._call(body, num_retries=attempt)
                if reply.finish != "cut" or not self._is_excused(began_s):
                    return reply
            except TimeoutError:
                if self._rng.random() < 0.5:
                    await asyncio.sleep(self._rng.expovariate(5.0))
        raise Crash

    def _is_excused(self, began_s: float) -> bool:
        host, port = self._place
        return self._was_killed(f"{host}:{port}", began_s)

    async def _call(self, body: dict[str, Any], *, num_retries: int) -> Reply:
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            writer.write(self._request(body, num_retries))
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status = int(head.split(" ", 2)[1])
            data = await _read_body(reader, head.lower())
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            return Reply(0, repr(error), "cut")
        finally:
            writer.close()
        if status != 200:
            return Reply(status, data.decode(), "refused")
        return _streamed(data) if body["stream"] else _whole(data)

    def _request(self, body: dict[str, Any], num_retries: int) -> bytes:
        data = json.dumps(body).encode()
        is_marked = num_retries > 0 and self._rng.random() < 0.5
        mark = f"x-stainless-retry-count: {num_retries}\r\n" if is_marked else ""
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {self._key}\r\n"
            f"{mark}content-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def _read_body(reader: asyncio.StreamReader, head: str) -> bytes:
    if "transfer-encoding: chunked" not in head:
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        return await reader.readexactly(int(length.split(":")[1]))
    parts = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        part = await reader.readexactly(size + 2)
        if size == 0:
            return b"".join(parts)
        parts.append(part[:-2])


def _whole(data: bytes) -> Reply:
    choice = json.loads(data)["choices"][0]
    return Reply(200, choice["message"]["content"] or "", choice["finish_reason"])


def _streamed(data: bytes) -> Reply:
    text, finish = "", "none"
    events = [one for one in data.decode().split("\n\n") if one and not one.startswith(":")]
    if events[-1:] != ["data: [DONE]"]:
        return Reply(200, data.decode(), "no end")
    for event in events[:-1]:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        text += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
    return Reply(200, text, finish)
