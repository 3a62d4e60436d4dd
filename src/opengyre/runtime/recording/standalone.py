"""A gateway on its own: records whoever talks to it, over engines that run elsewhere.

Owns: the records folder, sessions by name, the order of opening and closing. Must not know: the
command line. Invariants: a folder has one writer and records of one tokenizer; any name opens a
session for the holder of the one key, and a name known from the records goes on from them; what
was answered is durable when `serve` returns.
"""

import asyncio
import contextlib
import fcntl
import gc
import hashlib
import hmac
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from opengyre.config.harness_profile import load_profile
from opengyre.config.watched import WATCHED_PATTERN
from opengyre.engines.http_stream import parse_origin
from opengyre.engines.probe import EngineKind
from opengyre.gateway.call_counts import watched_regex
from opengyre.gateway.continuation import Continued
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.protocol import raise_file_limit
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.request import Refusal, RefusalKind
from opengyre.gateway.restoring import NOTHING_EARLIER, Earlier
from opengyre.gateway.sessions import Session
from opengyre.runtime.label_rules import label_rules
from opengyre.runtime.recording.engine_fleet import EngineFleet, open_fleet
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef, TurnRecord
from opengyre.store.run_folder import check_free_space, read_json, write_json
from opengyre.store.segments import SegmentReader, SegmentWriter, make_durable, segment_numbers

log = logging.getLogger(__name__)

KIND = "opengyre gateway records"
SCHEMA = 1
CLOSED = "closed"
MAX_SESSIONS = 100_000
MIN_FREE_BYTES = 64 * 2**20
UNSURE_S = 2.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneSettings:
    """`engines` are addresses, `model` a folder with the tokenizer, `key` what clients send.
    `profile` names a harness whose calls are labelled; "" labels nothing."""

    engines: tuple[str, ...]
    model: Path
    out: Path
    key: str = field(repr=False)
    engine_key: str = field(default="", repr=False)
    kind: EngineKind = EngineKind.AUTO
    host: str = "127.0.0.1"
    port: int = 0
    profile: str = ""
    context_tokens: int | None = None
    allow_rerender: bool = False


@dataclass(slots=True, kw_only=True)
class Totals:
    """What was recorded since the start; `num_cut` requests still ran at the end."""

    num_sessions: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_moves: int = 0
    num_cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Told once the port is open."""

    address: str
    engines: list[str]
    num_known_sessions: int


async def serve(
    settings: StandaloneSettings, *, on_ready: Callable[[Ready], None], until: asyncio.Event
) -> Totals:
    """Record until `until` is set. Raises ConfigError for what cannot work, before anything is
    written; BoundaryError when records cannot be written."""
    raise_file_limit()
    renderer = load_renderer(settings.model, allow_rerender=settings.allow_rerender)
    labels = label_rules(load_profile(settings.profile)) if settings.profile else ()
    origins = [parse_origin(url, api_key=settings.engine_key) for url in settings.engines]
    fleet = await open_fleet(origins, kind=settings.kind, context_tokens=settings.context_tokens)
    totals = Totals()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(records_folder(settings.out, settings.model))
        known = await asyncio.to_thread(records_of, folder)
        recorder = SegmentWriter(folder.tokens)
        stack.push_async_callback(recorder.close)
        sessions = Sessions(fleet, known, key=settings.key, tokens=folder.tokens)
        gateway = Gateway(
            GatewaySettings(
                max_context_tokens=fleet.context_tokens,
                host=settings.host,
                port=settings.port,
                model=settings.model.resolve().name,
                labels=labels,
                watched=watched_regex(WATCHED_PATTERN),
            ),
            renderer=renderer,
            recorder=recorder,
            events=_events(totals, sessions),
        )
        sessions.gateway = gateway
        await stack.enter_async_context(_serving(gateway, fleet))
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections need not go over it, in mid-stream
        on_ready(
            Ready(
                address=gateway.address,
                engines=[member.words() for member in fleet.members],
                num_known_sessions=len(known),
            )
        )
        await until.wait()
        totals.num_cut = await sessions.close()
        totals.num_sessions = len(sessions.names)
    return totals


@contextlib.asynccontextmanager
async def _serving(gateway: Gateway, fleet: EngineFleet) -> AsyncIterator[None]:
    async with gateway, asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(fleet.run(gateway))
        yield
        keeping.cancel()


class Sessions:
    """Opens a session for each name that the key's holder asks for. `names` are those open."""

    def __init__(self, fleet: EngineFleet, known: "KnownTurns", *, key: str, tokens: Path) -> None:
        self.names: list[str] = []
        self.gateway: Gateway | None = None
        self._fleet = fleet
        self._known = known
        self._key = key
        self._reader = SegmentReader(tokens)
        self._opening: dict[str, asyncio.Lock] = {}
        self._is_closed = False

    async def open_unknown(self, name: str, keys: list[str]) -> None:
        """Raises Refusal to the holder of the key if it cannot be; tells others nothing."""
        is_key = [hmac.compare_digest(one.encode(), self._key.encode()) for one in keys]
        if not any(is_key) or self._is_closed:
            return
        if NAME.fullmatch(name) is None:
            raise Refusal(
                "a session's name has letters, digits, '.', '_' and '-', at most 128 of them"
            )
        if len(self.names) >= MAX_SESSIONS:
            raise Refusal("too many sessions", kind=RefusalKind.TOO_MANY)
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name not in self.names and not self._is_closed:
                await self._open(name)

    async def _open(self, name: str) -> None:
        """What lies on disk of it is read and restored while others are served."""
        assert self.gateway is not None, "a call before the gateway was there"
        if name in self._known:
            session = await asyncio.to_thread(self._restored, name, self.gateway)
        else:
            session, _ = self.gateway.restored(name, NOTHING_EARLIER)
        seed = zlib.crc32(name.encode())
        self.gateway.open_restored(session, self._key, self._fleet.route(name), seed=seed)
        self._known.pop(name, None)
        self.names.append(name)

    def _restored(self, name: str, gateway: Gateway) -> Session:
        turns = self._known[name]
        try:
            records = [self._reader.read(turn.ref) for turn in turns]
        except BoundaryError as error:
            raise Refusal(str(error), kind=RefusalKind.UNAVAILABLE) from error
        num_unsure = sum(turn.is_unsure for turn in turns)
        earlier = Earlier(records=records, num_undelivered=num_unsure)
        session, problems = gateway.restored(name, earlier)
        for problem in problems:
            log.warning("%s: %s", name, problem)
        return session

    async def close(self) -> int:
        """End all; the number of requests that were cut."""
        self._is_closed = True
        assert self.gateway is not None, "closed before it was opened"
        counts = [await self.gateway.close_session(name) for name in self.names]
        return sum(one.num_cancelled for one in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFolder:
    """`was_closed`: who wrote last ended in order, and every client had its answer."""

    tokens: Path
    was_closed: bool


@dataclass(slots=True, kw_only=True)
class KnownTurn:
    """Where a turn lies. `is_unsure`: it ended so near the end of a writer that was killed that
    its client may never have had the answer."""

    ref: SegmentRef
    ended_s: float
    is_unsure: bool = False


KnownTurns = dict[str, list[KnownTurn]]


def records_of(folder: RecordsFolder) -> KnownTurns:
    """Where the turns of each session lie, in the order they were written.

    Blocks; what a writer that died left unsynced is synced first. Raises BoundaryError.
    """
    segments = segment_numbers(folder.tokens)
    make_durable(folder.tokens, segments)
    reader = SegmentReader(folder.tokens)
    known: KnownTurns = {}
    for segment in segments:
        for header in reader.scan_headers(segment):
            turn = KnownTurn(ref=header.ref, ended_s=header.ended_s)
            known.setdefault(header.execution, []).append(turn)
    last_s = max((turn.ended_s for turns in known.values() for turn in turns), default=0.0)
    for turn in chain.from_iterable(known.values()):
        turn.is_unsure = not folder.was_closed and turn.ended_s > last_s - UNSURE_S
    return known


@contextlib.contextmanager
def records_folder(path: Path, model: Path) -> Iterator[RecordsFolder]:
    """The folder at `path`, made if it is not there, locked while inside.

    Raises ConfigError for a folder of another kind or tokenizer, or one that is written to.
    """
    manifest = {
        "kind": KIND,
        "schema": SCHEMA,
        "model": str(model.resolve()),
        "tokenizer_sha256": hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest(),
    }
    tokens = path / "tokens"
    try:
        if not _is_ours(path, manifest):
            tokens.mkdir(parents=True, exist_ok=True)
            check_free_space(path, MIN_FREE_BYTES)
            write_json(path / "config.json", manifest)
        with (path / "lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.seek(0)
            was_closed = lock.read() == CLOSED
            lock.truncate(0)
            yield RecordsFolder(tokens=tokens, was_closed=was_closed)
            lock.write(CLOSED)
    except BlockingIOError as error:
        raise ConfigError(f"{path}: another gyre gateway records into it") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be used: {error.strerror or error}") from error


def _is_ours(path: Path, manifest: dict[str, Any]) -> bool:
    """False for an empty or missing folder."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    if not path.is_dir() or not (path / "config.json").is_file():
        raise ConfigError(f"{path}: not a folder of gyre gateway; name an empty or a new one")
    found = read_json(path / "config.json")
    if found.get("kind") != KIND or found.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: holds something else than records of this gyre gateway")
    if found.get("tokenizer_sha256") != manifest["tokenizer_sha256"]:
        raise ConfigError(f"{path}: holds records of another tokenizer ({found.get('model')})")
    return True


def _events(totals: Totals, sessions: Sessions) -> GatewayEvents:
    def on_turn(turn: TurnRecord) -> None:
        totals.num_turns += 1
        totals.num_tokens += turn.num_completion_tokens

    def on_continued(moved: Continued) -> None:
        totals.num_moves += 1

    return GatewayEvents(
        on_turn=on_turn,
        on_hold=lambda execution, started: None,
        on_continued=on_continued,
        on_unknown=sessions.open_unknown,
    )
