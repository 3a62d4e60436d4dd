"""What moving live requests off a cell costs: with their KV handed over, and recomputed.

Run: `python benchmarks/moves.py [--model tiny|smollm2|FOLDER] [--sizes 1024,8192] [--json FILE]`.
Two cells, each a process of one torch thread with engine, engine link and training side, do for
this process what they do for the controller and the gateway: the door is closed, all is frozen,
each request goes on at the other cell, the first one enters training. The pins of cell 0 are read
through shared memory and those of cell 1 by TCP, so requests that go to and fro show both. Prefixes
are random ids; the models get as many positions as they need (SmolLM2 was trained on 8,192).
The last move of a size hands nothing over; `--no-recompute` leaves it out and takes the time of the
first prefill instead (marked ~), which spares minutes at 32,768 tokens of SmolLM2.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from moves_bench import messages as m
from moves_bench.models import HELP, TINY, chosen

from opengyre.seams.engine import Chunk, Finish, GenerateRequest
from opengyre.seams.kv import KVRef, KVTaken
from opengyre.transport.engine_link import RemoteEngine
from opengyre.transport.framed import Peer, serve

PLANES = ("shm", "tcp")
VOCABULARY = 700
ROOM_TOKENS = 4096
STEP_TOKENS = 512
TURN_TOKENS = 64
TOKENS_IN_ALL = 16_384
MAX_REQUESTS = 4
NUM_SWITCHES = 2
DEADLINE_S = 3600.0
START_S = 120.0
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    model: str
    sizes: list[int]
    rounds: int
    handoff: str
    has_recompute: bool
    is_pool_new: bool
    json: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Times from the closing of the door. `next_s`: of each request; `parts`: what the source took
    for what; `reasons`: why any was recomputed although its KV was offered."""

    size: int
    how: str
    training_s: float
    next_s: list[float]
    read_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    is_estimate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMove:
    """`handed_s`: from the closing of the door until the prefix was cached at the other cell;
    `read_s`, `read_bytes`: of all that were read, one after the other."""

    size: int
    how: str
    handed_s: float
    warm_s: float
    cold_s: float
    read_s: float
    read_bytes: int


@dataclass(slots=True, kw_only=True)
class Figures:
    model: str = ""
    num_parameters: int = 0
    bytes_per_token: int = 0
    is_pool_new: bool = False
    copies: dict[int, dict[str, float]] = field(default_factory=dict)
    switches: list[dict[str, float]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    idle: list[IdleMove] = field(default_factory=list)


class Turn:
    """One request as a gateway sees it: read as it comes, to its terminal chunk."""

    def __init__(self, chunks: AsyncIterator[Chunk]) -> None:
        self.ids: list[int] = []
        self.first = asyncio.Event()
        self.first_s = 0.0
        self.taken: KVTaken | None = None
        self.last = Chunk()
        self.reading = asyncio.create_task(self._read(chunks))

    async def _read(self, chunks: AsyncIterator[Chunk]) -> None:
        async for chunk in chunks:
            self.taken = chunk.taken or self.taken
            if chunk.ids and not self.first.is_set():
                self.first_s = time.perf_counter()
                self.first.set()
            self.ids += chunk.ids
            self.last = chunk
        if not self.first.is_set():
            raise RuntimeError(f"no token came: {self.last.finish} {self.last.reason}")


class Site:
    """A cell, as the controller and a gateway reach it."""

    def __init__(self, ready: m.Ready, peer: Peer) -> None:
        self.ready = ready
        self.plane = PLANES[ready.cell]
        self.num_used = 0
        self.offered: asyncio.Queue[KVRef] = asyncio.Queue()
        self.engine = RemoteEngine(
            ready.link_address, name=f"c{ready.cell}", on_prefixes=self._take_offered
        )
        self._peer = peer

    def _take_offered(self, refs: list[KVRef]) -> list[str]:
        for ref in refs:
            self.offered.put_nowait(ref)
        return [ref.ref for ref in refs]

    async def call(self, message: m.Message) -> Any:
        return await self._peer.call(message, timeout_s=DEADLINE_S)

    def quit(self) -> None:
        self._peer.notify(m.Quit())


@dataclass(slots=True, kw_only=True)
class Execution:
    """`ids`: its prompt and all tokens so far but those of `turn`."""

    name: str
    ids: list[int]
    turn: Turn | None = None
    num_requests: int = 0

    def begin(self, site: Site, kv: KVRef | None = None) -> Turn:
        if self.turn is not None:
            self.ids += self.turn.ids
        self.num_requests += 1
        request = GenerateRequest(
            request_id=f"{self.name}.t{self.num_requests}",
            execution=self.name,
            prompt_ids=list(self.ids),
            max_new_tokens=ROOM_TOKENS,
            seed=self.num_requests,
            kv=kv,
        )
        self.turn = Turn(site.engine.submit(request))
        return self.turn

    async def stop(self, site: Site) -> None:
        assert self.turn is not None, "nothing to stop"
        await site.engine.cancel(f"{self.name}.t{self.num_requests}")
        await self.turn.reading


def main() -> None:
    options = _options()
    figures = asyncio.run(measure(options))
    tables = (moves_table, idle_table, bytes_table, switch_table)
    print("\n\n".join("\n".join(table(figures)) for table in tables))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")


def _options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=chosen, default=TINY, help=HELP)
    parser.add_argument("--sizes", default="1024,8192", help="prefixes in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="moves by each plane")
    parser.add_argument("--handoff", choices=("auto", "on"), default="auto")
    parser.add_argument("--no-recompute", action="store_true")
    parser.add_argument(
        "--new-pool", action="store_true", help="KV memory that nobody wrote before at each cell"
    )
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    return Options(
        model=told.model,
        sizes=[int(one) for one in told.sizes.split(",")],
        rounds=told.rounds,
        handoff=told.handoff,
        has_recompute=not told.no_recompute,
        is_pool_new=told.new_pool,
        json=told.json,
    )


async def measure(options: Options) -> Figures:
    figures = Figures(model=options.model, is_pool_new=options.is_pool_new)
    async with two_cells(options) as sites:
        figures.num_parameters = sites[0].ready.num_parameters
        figures.bytes_per_token = sites[0].ready.bytes_per_token
        for size in options.sizes:
            await measure_size(size, options, sites, figures)
    return figures


async def switched(site: Site) -> dict[str, float]:
    """An idle cell goes to training and back; nothing is cached there then."""
    await site.call(m.CloseAndFreeze(keeps_kv=False))
    entered = await site.call(m.EnterTraining())
    left = await site.call(m.LeaveTraining(num_used=site.num_used))
    return {**msgspec.structs.asdict(entered), **msgspec.structs.asdict(left)}


async def measure_size(size: int, options: Options, sites: list[Site], figures: Figures) -> None:
    num_requests = max(1, min(MAX_REQUESTS, TOKENS_IN_ALL // size))
    num_bytes = size * figures.bytes_per_token
    for site in sites:
        site.num_used = 0 if options.is_pool_new else num_requests
        figures.switches += [await switched(site) for _ in range(NUM_SWITCHES)]
    copied = await sites[1].call(m.Copy(num_bytes=num_bytes))
    figures.copies[size] = msgspec.structs.asdict(copied)
    draw = random.Random(size)
    executions = [
        Execution(name=f"e{size}.{number}", ids=draw.choices(range(1, VOCABULARY), k=size))
        for number in range(num_requests)
    ]
    _say(f"{size} tokens: {num_requests} prefills")
    source, target = sites
    first_s = await prefilled(executions, source)
    for _ in range(2 * options.rounds):
        figures.moves.append(await moved(size, executions, source, target, keeps_kv=True))
        _say(f"{size} tokens: {_words(figures.moves[-1])}")
        source, target = target, source
    if options.has_recompute:
        figures.moves.append(await moved(size, executions, source, target, keeps_kv=False))
        _say(f"{size} tokens: {_words(figures.moves[-1])}")
        source, target = target, source
    else:
        estimate = Move(size=size, how="recomputed", training_s=0, next_s=first_s, is_estimate=True)
        figures.moves.append(estimate)
    for one in executions:
        await one.stop(source)
    for _ in PLANES:
        idle = await idle_moved(size, executions, source, target, cold_s=first_s[0])
        figures.idle.append(idle)
        source, target = target, source


async def prefilled(executions: list[Execution], site: Site) -> list[float]:
    """Seconds until the first token of each: the first one had the cell for itself."""
    began_s = time.perf_counter()
    times = []
    for group in (executions[:1], executions[1:]):
        turns = [one.begin(site) for one in group]
        for turn in turns:
            await turn.first.wait()
        times += [turn.first_s - began_s for turn in turns]
    return times


async def moved(
    size: int, executions: list[Execution], source: Site, target: Site, *, keeps_kv: bool
) -> Move:
    """All go from one cell to the other, which is back in rollout on return."""
    began_s = time.perf_counter()
    going_on = [asyncio.create_task(_continued(one, source, target)) for one in executions]
    frozen = await source.call(m.CloseAndFreeze(keeps_kv=keeps_kv))
    entered = await source.call(m.EnterTraining())
    training_s = time.perf_counter() - began_s
    turns = await asyncio.gather(*going_on)
    await source.call(m.LeaveTraining(num_used=source.num_used))
    takens = [one.taken for one in turns if one.taken is not None]
    read = [one for one in takens if one.num_bytes]
    return Move(
        size=size,
        how=source.plane if keeps_kv else "recomputed",
        training_s=training_s,
        next_s=[one.first_s - began_s for one in turns],
        read_s=[one.read_s for one in read],
        num_bytes=sum(one.num_bytes for one in read),
        parts={"freeze_s": frozen.seconds, **msgspec.structs.asdict(entered)},
        reasons=[one.reason for one in takens if one.reason],
    )


async def _continued(one: Execution, source: Site, target: Site) -> Turn:
    assert one.turn is not None, "nothing runs"
    await one.turn.reading
    kv = one.turn.last.kv
    assert one.turn.last.finish is Finish.FROZEN, "it ended before the move"
    turn = one.begin(target, kv)
    await turn.first.wait()
    if kv is not None:
        await source.engine.release_kv(kv.ref)
    return turn


async def idle_moved(
    size: int, executions: list[Execution], source: Site, target: Site, *, cold_s: float
) -> IdleMove:
    """Nothing runs; what is cached of the executions is handed over, then the first one's next turn
    begins and ends."""
    began_s = time.perf_counter()
    frozen = await source.call(m.CloseAndFreeze(keeps_kv=True))
    entering = asyncio.create_task(source.call(m.EnterTraining()))
    first = executions[0]
    handed_s, takens = 0.0, []
    for _ in range(frozen.num_pinned):
        ref = await source.offered.get()
        taken = await target.engine.import_kv(ref)
        takens.append(taken)
        if ref.execution == first.name:
            handed_s = time.perf_counter() - began_s
        if taken.reason:
            _say(f"{size} tokens, idle: {taken.reason}")
        await source.engine.release_kv(ref.ref)
    await entering
    first.ids += [VOCABULARY + 1] * TURN_TOKENS
    asked_s = time.perf_counter()
    turn = first.begin(target)
    await turn.first.wait()
    await first.stop(target)
    await source.call(m.LeaveTraining(num_used=source.num_used))
    return IdleMove(
        size=size,
        how=source.plane,
        handed_s=handed_s,
        warm_s=turn.first_s - asked_s,
        cold_s=cold_s,
        read_s=sum(one.read_s for one in takens if one.num_bytes),
        read_bytes=sum(one.num_bytes for one in takens),
    )


@contextlib.asynccontextmanager
async def two_cells(options: Options) -> AsyncIterator[list[Site]]:
    """In the order of their numbers, doors open."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arrived: asyncio.Queue[Site] = asyncio.Queue()
        server, address = await serve(f"unix:{folder}/moves.sock", _take_cells(arrived))
        stack.callback(server.close)
        for cell in range(len(PLANES)):
            stack.push_async_callback(_end, _start(options, cell, address))
        _say(f"two cells start with the model {options.model}")
        sites = []
        async with asyncio.timeout(START_S):
            sites += [await arrived.get() for _ in PLANES]
        for site in sites:
            stack.callback(site.quit)
            await stack.enter_async_context(site.engine)
        yield sorted(sites, key=lambda site: site.ready.cell)


def _take_cells(
    arrived: "asyncio.Queue[Site]",
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def handle(message: Any) -> None:
            assert isinstance(message, m.Ready), "only a ready cell speaks by itself"
            arrived.put_nowait(Site(message, peer))

        peer = Peer(reader, writer, wire=m.WIRE, handler=handle, name="cell")
        await peer.run()

    return on_connection


def _start(options: Options, cell: int, address: str) -> "subprocess.Popen[bytes]":
    spec = {
        "cell": cell,
        "address": address,
        "model": options.model,
        "plane": PLANES[cell],
        "handoff": options.handoff,
        "context_tokens": max(options.sizes) + ROOM_TOKENS,
        "num_slots": 2 * MAX_REQUESTS,
        "step_tokens": STEP_TOKENS,
    }
    command = [sys.executable, "-m", "moves_bench.cell", json.dumps(spec)]
    return subprocess.Popen(command, cwd=Path(__file__).resolve().parent)


async def _end(process: "subprocess.Popen[bytes]") -> None:
    """It was told to quit."""
    try:
        await asyncio.to_thread(process.wait, timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def moves_table(figures: Figures) -> list[str]:
    lines = [
        f"{figures.model}: {figures.num_parameters / 1e6:.2f} M parameters, "
        f"{figures.bytes_per_token} bytes of KV for each token",
        "",
        "| prefix | requests | MB each | how | door closed to training | to the next token, "
        "median / last | recomputed over it | auto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in figures.copies:
        of_size = [one for one in figures.moves if one.size == size]
        base = _median(_middles([one for one in of_size if one.how == "recomputed"]))
        groups = [[one for one in of_size if one.how == how] for how in (*PLANES, "recomputed")]
        lines += [_move_row(figures, size, group, base) for group in groups if group]
    return lines


def _move_row(figures: Figures, size: int, group: list[Move], base: float) -> str:
    middle = _median(_middles(group))
    last = _median([max(one.next_s) for one in group])
    mark = "~" if group[0].is_estimate else ""
    cells = [
        f"{size:,}",
        str(len(group[0].next_s)),
        f"{size * figures.bytes_per_token / 1e6:.1f}",
        group[0].how,
        "" if mark else _time(_median([one.training_s for one in group])),
        f"{mark}{_time(middle)} / {mark}{_time(last)}",
        f"{base / middle:.1f}" if base else "",
        _auto(group),
    ]
    return "| " + " | ".join(cells) + " |"


def _auto(group: list[Move]) -> str:
    if group[0].how == "recomputed":
        return ""
    num_read = sum(len(one.read_s) for one in group)
    words = f"read {num_read} of {sum(len(one.next_s) for one in group)}"
    reasons = sorted({reason for one in group for reason in one.reasons})
    return f"{words}: {'; '.join(reasons)}" if reasons else words


def switch_table(figures: Figures) -> list[str]:
    names = ("release_s", "enter_s", "leave_s", "restore_s", "load_s")
    medians = [_time(_median([one[name] for one in figures.switches])) for name in names]
    return [
        "An idle cell goes to training and back:",
        "",
        "| release KV | enter training | leave it | restore KV | pull, verify, write weights |",
        "|---|---|---|---|---|",
        "| " + " | ".join(medians) + " |",
    ]


def idle_table(figures: Figures) -> list[str]:
    lines = [
        "| idle prefix | how | handed over after | first token of the next turn, warm | cold | "
        "cold / warm |",
        "|---|---|---|---|---|---|",
    ]
    for one in figures.idle:
        times = [_time(value) for value in (one.handed_s, one.warm_s, one.cold_s)]
        cells = [f"{one.size:,}", one.how, *times, f"{one.cold_s / one.warm_s:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def bytes_table(figures: Figures) -> list[str]:
    """What is read of idle prefixes, one at a time, beside a plain copy of as many bytes."""
    name, what = ("new_s", "new") if figures.is_pool_new else ("warm_s", "used")
    lines = [
        f"| prefix | MB | how | GB/s | of a copy into {what} memory |",
        "|---|---|---|---|---|",
    ]
    for one in figures.idle:
        num_bytes = one.size * figures.bytes_per_token
        if one.read_s:
            rate, copy = one.read_bytes / one.read_s, num_bytes / figures.copies[one.size][name]
            cells = [f"{one.size:,}", f"{num_bytes / 1e6:.1f}", one.how]
            cells += [f"{rate / 1e9:.2f}", f"{rate / copy:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _middles(group: Iterable[Move]) -> list[float]:
    return [statistics.median(one.next_s) for one in group]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _words(move: Move) -> str:
    nexts = ", ".join(_time(one) for one in move.next_s)
    return f"{move.how}: training after {_time(move.training_s)}, next tokens after {nexts}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
