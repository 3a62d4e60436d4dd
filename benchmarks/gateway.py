"""What a gateway adds to a stream, how many requests it takes, and what an engine's leaving breaks.

Run: `python benchmarks/gateway.py [--only NAME]`. Scripted engines in their own processes, the
load in this one; a direct connection, OpenGyre and the peers one after another in the same run.
Absolute figures depend on the machine; compare the rows.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from gateway_bench.load import Heard, Target, burst, closed_loop
from gateway_bench.processes import PEERS, Gateway, engines, gateway, install_peers

DIRECT = "direct"
NAMES = (DIRECT, "opengyre", *PEERS)
PACED_TOKENS_PER_S = 25
PACED_TOKENS = 48
PACED_S = 8.0
THINK_S = 1.0
FAST_TOKENS = 16
FAST_S = 5.0
MOVE_STREAMS = 1000
MOVE_TOKENS = 24
MOVE_TOKENS_PER_S = 2.0
MOVE_RAMP_S = 3.0
AWAY_S = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds: to the engine and back with the first token, and each later token's way back."""

    first: list[float]
    later: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=NAMES[1:])
    parser.add_argument("--part", action="append", choices=("paced", "fast", "moves"))
    asked = parser.parse_args()
    missing = install_peers()
    for name, reason in missing.items():
        say(f"{name}: left out, it cannot be installed ({reason})")
    names = [one for one in NAMES if one not in missing and one in (DIRECT, *(asked.only or NAMES))]
    parts = {"paced": paced, "fast": fast, "moves": moves}
    for part in asked.part or parts:
        parts[part](names)


def paced(names: list[str]) -> None:
    say(f"\nAdded latency, 32 sessions at {PACED_TOKENS_PER_S} tokens/s each, ms (p50 / p95)\n")
    say("| | first token | each later token | processor ms / token |")
    say("|---|---|---|---|")
    direct: Delays | None = None
    with engines(1, num_tokens=PACED_TOKENS, tokens_per_s=PACED_TOKENS_PER_S) as urls:
        for name, made in each_gateway(names, urls):
            heard, processor_s = measured(
                made, lambda t: closed_loop(t, num_sessions=32, duration_s=PACED_S, think_s=THINK_S)
            )
            delays = delays_of(heard, emissions(urls[0]))
            num_tokens = sum(len(one.text) for one in heard)
            if direct is None:
                direct = delays
                say(f"| direct, absolute | {words(delays.first)} | {words(delays.later)} | |")
                continue
            first, later = added(delays.first, direct.first), added(delays.later, direct.later)
            say(f"| {name} | {first} | {later} | {1e3 * processor_s / num_tokens:.3f} |")


def fast(names: list[str]) -> None:
    say(f"\nRequests/s, {FAST_TOKENS} tokens each, streamed as fast as the engine can\n")
    say("| | 32 sessions | 256 sessions | processor ms / request (256) |")
    say("|---|---|---|---|")
    with engines(1, num_tokens=FAST_TOKENS, tokens_per_s=0) as urls:
        for name, made in each_gateway(names, urls):
            rates, cost = [], 0.0
            for num in (32, 256):
                begin_s = time.monotonic()
                heard, processor_s = measured(
                    made, lambda t, num=num: closed_loop(t, num_sessions=num, duration_s=FAST_S)
                )
                whole = sum(one.is_whole(FAST_TOKENS) for one in heard)
                rates.append(whole / (time.monotonic() - begin_s))
                cost = 1e3 * processor_s / max(1, whole)
                emissions(urls[0])
            say(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {cost:.2f} |")


def moves(names: list[str]) -> None:
    say(f"\n{MOVE_STREAMS:,} streams over 2 engines, one of them leaving each second\n")
    say("| | broken | why | engine moves | seconds |")
    say("|---|---|---|---|---|")
    with engines(2, num_tokens=MOVE_TOKENS, tokens_per_s=MOVE_TOKENS_PER_S) as urls:
        for name, made in each_gateway([one for one in names if one != DIRECT], urls):
            begin_s = time.monotonic()
            heard, num_moves = asyncio.run(with_moves(made.target, urls))
            broken = [one for one in heard if not one.is_whole(MOVE_TOKENS)]
            reasons = sorted({one.failure or "not whole" for one in broken})
            row = (name, len(broken), "; ".join(reasons)[:80], num_moves)
            say(f"| {' | '.join(map(str, row))} | {time.monotonic() - begin_s:.0f} |")


async def with_moves(target: Target, urls: list[str]) -> tuple[list[Heard], int]:
    """While the streams run, each engine in turn cuts all it serves and is away for a while."""
    num_moves = 0

    async def leave_in_turn() -> None:
        nonlocal num_moves
        await asyncio.sleep(MOVE_RAMP_S)
        async with httpx.AsyncClient() as client:
            while True:
                url = urls[num_moves % len(urls)]
                await client.post(f"{url}/scripted/leave", json={"for_s": AWAY_S})
                num_moves += 1
                await asyncio.sleep(1.0)

    leaving = asyncio.ensure_future(leave_in_turn())
    try:
        heard = await burst(target, num_streams=MOVE_STREAMS, ramp_s=MOVE_RAMP_S)
    finally:
        leaving.cancel()
    return heard, num_moves


def each_gateway(names: list[str], urls: list[str]) -> Iterator[tuple[str, Gateway]]:
    """One after another, each alone; one that does not start is named and left out."""
    for name in names:
        try:
            with opened(name, urls) as made:
                yield name, made
        except RuntimeError as error:
            say(f"| {name} | left out: {error} | | |")


@contextmanager
def opened(name: str, urls: list[str]) -> Iterator[Gateway]:
    if name == DIRECT:
        yield Gateway(target=Target(url=urls[0], path="/v1/chat/completions"), pid=0)
        return
    with gateway(name, urls) as made:
        asyncio.run(closed_loop(made.target, num_sessions=4, duration_s=0.5))
        for url in urls:
            emissions(url)
        yield made


def measured(made: Gateway, load: Callable[[Target], object]) -> tuple[list[Heard], float]:
    """What was heard, and the processor seconds that the gateway took for it."""
    before_s = made.processor_s() if made.pid else 0.0
    heard = asyncio.run(load(made.target))  # type: ignore[arg-type]
    return heard, made.processor_s() - before_s if made.pid else 0.0


def emissions(url: str) -> dict[str, list[tuple[float, int]]]:
    """When the engine was asked and gave each token, by tag; asking forgets them."""
    found: dict[str, list[tuple[float, int]]] = {}
    for at_s, tail, num_tokens in httpx.get(f"{url}/scripted/emissions", timeout=30).json():
        tag = tail[tail.rfind("tag ") :].partition(";")[0] + ";"
        found.setdefault(tag, []).append((at_s, num_tokens))
    return found


def delays_of(heard: list[Heard], emitted: dict[str, list[tuple[float, int]]]) -> Delays:
    first, later = [], []
    for one in heard:
        times = emitted.get(one.tag, [])
        if not one.arrivals or len(times) < 2:
            continue
        given = {num: at_s for at_s, num in reversed(times)}
        for number, (at_s, num_letters) in enumerate(one.arrivals):
            back_s = at_s - given.get(num_letters, at_s)
            if number == 0:
                first.append(back_s + times[0][0] - one.sent_s)
            else:
                later.append(back_s)
    return Delays(first=sorted(first), later=sorted(later))


def at(values: list[float], share: float) -> float:
    return 1e3 * values[min(len(values) - 1, int(share * len(values)))]


def words(values: list[float]) -> str:
    return f"{at(values, 0.5):.2f} / {at(values, 0.95):.2f}"


def added(values: list[float], direct: list[float]) -> str:
    return " / ".join(f"{at(values, p) - at(direct, p):+.2f}" for p in (0.5, 0.95))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
