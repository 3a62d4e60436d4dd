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
from functools import partial

import httpx
from gateway_bench.load import Heard, Target, closed_loop, streams
from gateway_bench.processes import PEERS, Gateway, engines, gateway, install_peers

DIRECT = "direct"
NAMES = (DIRECT, "opengyre", *PEERS)
PARTS = ("paced", "fast", "moves")
PACED_TOKENS_PER_S = 25
PACED_TOKENS = 48
PACED_S = 5.0
THINK_S = 1.0
FAST_TOKENS = 16
FAST_S = 3.0
MOVE_STREAMS = 1000
MOVE_TOKENS = 24
MOVE_TOKENS_PER_S = 15.0
MOVE_AT_ONCE = 128
AWAY_S = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds: to the engine and back with the first token, and each later token's way back."""

    first: list[float]
    later: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=NAMES[1:])
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many counts")
    asked = parser.parse_args()
    missing = install_peers()
    for name, reason in missing.items():
        say(f"{name}: left out, it cannot be installed ({reason})")
    names = [one for one in NAMES if one not in missing and one in (DIRECT, *(asked.only or NAMES))]
    if "paced" in asked.part:
        paced(names, asked.rounds)
    if "fast" in asked.part:
        fast(names, asked.rounds)
    if "moves" in asked.part:
        moves([one for one in names if one != DIRECT])


def paced(names: list[str], num_rounds: int) -> None:
    say(f"\nAdded latency, 32 sessions at {PACED_TOKENS_PER_S} tokens/s each, ms (p50 / p95)\n")
    say("| | first token | each later token | processor ms / token |")
    say("|---|---|---|---|")
    found: dict[str, list[tuple[Delays, float]]] = {}
    with engines(1, num_tokens=PACED_TOKENS, tokens_per_s=PACED_TOKENS_PER_S) as urls:
        for name, made in each_gateway(names * num_rounds, urls):
            heard, processor_s = measured(made, paced_load)
            delays = delays_of(heard, emissions(urls[0]))
            cost_ms = 1e3 * processor_s / sum(len(one.text) for one in heard)
            found.setdefault(name, []).append((delays, cost_ms))
    best = {
        name: min(rounds, key=lambda one: at(one[0].later, 0.5)) for name, rounds in found.items()
    }
    direct = best.pop(DIRECT)[0]
    say(f"| direct, absolute | {words(direct.first)} | {words(direct.later)} | |")
    for name, (delays, cost_ms) in best.items():
        first, later = added(delays.first, direct.first), added(delays.later, direct.later)
        say(f"| {name} | {first} | {later} | {cost_ms:.3f} |")


async def paced_load(target: Target) -> list[Heard]:
    return await closed_loop(target, num_sessions=32, duration_s=PACED_S, think_s=THINK_S)


def fast(names: list[str], num_rounds: int) -> None:
    say(f"\nRequests/s, {FAST_TOKENS} tokens each, streamed as fast as the engine can\n")
    say("| | 32 sessions | 256 sessions | processor ms / request |")
    say("|---|---|---|---|")
    rates: dict[str, dict[int, float]] = {}
    costs: dict[str, float] = {}
    with engines(1, num_tokens=FAST_TOKENS, tokens_per_s=0) as urls:
        for name, made in each_gateway(names * num_rounds, urls):
            for num in (32, 256):
                rate, cost_ms = fast_once(made, num)
                known = rates.setdefault(name, {})
                known[num] = max(rate, known.get(num, 0.0))
                costs[name] = min(cost_ms, costs.get(name, cost_ms))
                emissions(urls[0])
    for name, known in rates.items():
        cost = "" if name == DIRECT else f"{costs[name]:.2f}"
        say(f"| {name} | {known[32]:.0f} | {known[256]:.0f} | {cost} |")


def fast_once(made: Gateway, num_sessions: int) -> tuple[float, float]:
    """Whole answers a second, and the gateway's processor ms for each."""
    begin_s = time.monotonic()
    load = partial(closed_loop, num_sessions=num_sessions, duration_s=FAST_S)
    heard, processor_s = measured(made, load)
    num_whole = sum(one.is_whole(FAST_TOKENS) for one in heard)
    return num_whole / (time.monotonic() - begin_s), 1e3 * processor_s / max(1, num_whole)


def moves(names: list[str]) -> None:
    many = f"{MOVE_STREAMS:,} streams, {MOVE_AT_ONCE} at once"
    say(f"\n{many}, over 2 engines, one of them leaving each second\n")
    say("| | broken | how | refused calls | engine moves | seconds |")
    say("|---|---|---|---|---|---|")
    with engines(2, num_tokens=MOVE_TOKENS, tokens_per_s=MOVE_TOKENS_PER_S) as urls:
        for name, made in each_gateway(names, urls):
            begin_s = time.monotonic()
            heard, num_moves = asyncio.run(with_moves(made.target, urls))
            broken = [one for one in heard if not one.is_whole(MOVE_TOKENS)]
            reasons = sorted({one.failure or "not whole" for one in broken})
            num_refused = sum(one.num_refused for one in heard)
            row = (name, len(broken), "; ".join(reasons)[:80], num_refused, num_moves)
            say(f"| {' | '.join(map(str, row))} | {time.monotonic() - begin_s:.0f} |")


async def with_moves(target: Target, urls: list[str]) -> tuple[list[Heard], int]:
    """While the streams run, each engine in turn cuts all it serves and is away for a while."""
    num_moves = 0

    async def leave_in_turn() -> None:
        nonlocal num_moves
        async with httpx.AsyncClient() as client:
            while True:
                await asyncio.sleep(1.0)
                url = urls[num_moves % len(urls)]
                await client.post(f"{url}/scripted/leave", json={"for_s": AWAY_S})
                num_moves += 1

    leaving = asyncio.ensure_future(leave_in_turn())
    try:
        heard = await streams(target, num_streams=MOVE_STREAMS, num_at_once=MOVE_AT_ONCE)
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
