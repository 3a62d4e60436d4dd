"""What goes wrong in a seeded world, and when: drawn before the run, done at an event of it.

Owns: faults, their triggers, and doing them. Must not know: any rule of the system. Invariants:
a fault happens once, at the n-th event of a kind or at a step; after the last one nothing more
goes wrong, so everything must finish.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tests.sim.seeded_hosts import ChildProcess, WorldLoop
from tests.sim.seeded_loop import Host
from tests.sim.seeded_wire import MemoryTransport

_TYPE = b"\xa4type"
EVENTS = (
    *("ExposeWeights", "Exposed", "JoinStep", "Joined", "Claim", "Claimed", "Finished"),
    *("Settle", "Settled", "ReduceTogether", "ShareGradients", "Gradients", "ReduceStep"),
    *("Reduced", "UpdateStep", "Updated", "SaveState", "DropStep", "FreezeAll", "Frozen"),
    *("AdmitRequests", "LoadVersion", "Loaded"),
    *("BeTrainer", "RoleTaken", "BeEngine", "ShutDoor", "OpenDoorAt", "SetRoutes"),
    *("ConnectEngine", "OpenSession", "CloseSession", "TurnTold", "HoldTold", "ContinuedTold"),
    *("Submit", "ChunksTold", "Cancel", "Abandon", "EngineGone", "RestoreState"),
    *("work:pull_all", "work:run", "work:open_step", "work:_sync_files", "work:commit"),
)
TRAINING = (
    *("JoinStep", "Joined", "Claimed", "Claimed", "Finished", "Finished", "work:run", "work:run"),
    *("Settle", "Settled", "ReduceTogether", "ReduceTogether", "ReduceTogether", "Reduced"),
    *("Reduced", "ShareGradients", "Gradients", "ReduceStep", "UpdateStep", "Updated"),
)
GATEWAY = (
    *("OpenSession", "CloseSession", "SessionClosed", "TurnTold", "HoldTold", "ContinuedTold"),
    *("Submit", "ChunksTold", "Cancel", "ShutDoor", "OpenDoorAt", "SetRoutes", "FreezeAll"),
    *("Frozen", "LoadVersion", "Loaded", "ConnectEngine", "EngineGone", "GatewaySetup"),
    *("GatewayReady", "work:_sync_files", "work:make_durable"),
)
HANDOFF = (
    *("ImportKV", "TakenTold", "ReleaseKV", "ReleaseTold", "PrefixesOffered", "PrefixesClaimed"),
    *("HandoffTold", "FreezeAll", "Frozen", "BeTrainer", "Submit", "ChunksTold"),
)
SHORT_S = (0.05, 0.5, 3.0)
LONG_S = (3.0, 12.0, 40.0, 70.0, 135.0)


class Harm(StrEnum):
    KILL = "kill"
    STOP = "stop"
    CUT_LINK = "cut the engine link of"
    CUT_CONTROL = "cut the controller from"
    STOP_GATEWAY = "stop the gateway beside"
    SLOW_LOADS = "make every load slow beside"
    KILL_GATEWAY = "kill the gateway beside"
    CUT_GATEWAY = "cut the controller from the gateway beside"
    CRASH = "crash the controller beside"
    POWER_LOSS = "lose power beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At the `number`-th `event` ("step": at that step of the loop), of those about engine
    `about` if it is not "", harm `engine`; "" is the one that the event is about. `lasts_s` is
    for a stop."""

    event: str
    about: str = ""
    number: int
    harm: Harm
    engine: str
    lasts_s: float
    delay_s: float

    def __str__(self) -> str:
        of = f" of {self.about}" if self.about else ""
        when = f"{self.event} {self.number}{of}"
        return f"{self.harm} {self.engine or 'it'} at {when} (+{self.delay_s} s, {self.lasts_s} s)"


def draw_faults(rng: Random, engines: tuple[str, ...], *, num_most: int) -> tuple[Fault, ...]:
    """Up to `num_most`, at most one of those that end the run."""
    faults = [_draw(rng, engines) for _ in range(rng.randint(0, num_most))]
    if rng.random() < 0.12:
        harm = rng.choice([Harm.KILL_GATEWAY, Harm.CRASH, Harm.CRASH, Harm.POWER_LOSS])
        faults.append(_draw(rng, engines, harm))
    return tuple(faults)


def _draw(rng: Random, engines: tuple[str, ...], harm: Harm | None = None) -> Fault:
    if harm is None and rng.random() < 0.5:
        return _draw_in_training(rng, engines)
    if harm is None and rng.random() < 0.2:
        return _draw_at_publication(rng, engines)
    is_at_step = rng.random() < 0.3
    often = [Harm.KILL] * 6 + [Harm.STOP] * 4
    rare = [Harm.CUT_LINK, Harm.CUT_LINK, Harm.CUT_CONTROL, Harm.STOP_GATEWAY] + [
        Harm.SLOW_LOADS
    ] * 2
    harm = harm or rng.choice(often + rare)
    return Fault(
        event="step" if is_at_step else rng.choice(EVENTS),
        number=rng.randint(200, 6000) if is_at_step else rng.choice([1, 1, 2, 3, 5, 8]),
        harm=harm,
        engine="" if rng.random() < 0.5 else rng.choice(engines),
        lasts_s=rng.choice(SHORT_S if harm is Harm.STOP_GATEWAY else SHORT_S + LONG_S),
        delay_s=rng.choice([0.0, 0.0, 0.0005, 0.01]),
    )


def _draw_in_training(rng: Random, engines: tuple[str, ...]) -> Fault:
    """A cell's death or hang in a step; a satellite's more often than the core's."""
    cells = [one for one in engines if one.startswith("c")]
    victim = rng.choice([*cells[1:], *cells[1:], *cells])
    event = rng.choice(TRAINING)
    is_of_core = event in ("ReduceStep", "Reduced", "UpdateStep", "Updated")
    return Fault(
        event=event,
        about="" if is_of_core else victim,
        number=rng.choice([1, 1, 1, 1, 2, 3]),
        harm=rng.choice([Harm.KILL, Harm.KILL, Harm.KILL, Harm.KILL, Harm.STOP]),
        engine=victim,
        lasts_s=rng.choice(SHORT_S + LONG_S),
        delay_s=rng.choice([0.0, 0.0, 0.0005, 0.01, 0.1]),
    )


def draw_gateway_deaths(rng: Random) -> tuple[Fault, ...]:
    """At times one, at times two close to each other; fewer than end a run. Now and then one
    hangs for longer than anyone waits."""
    return tuple(
        Fault(
            event=rng.choice(GATEWAY),
            number=rng.choice([1, 2, 3, 5, 8, 13, 21]),
            harm=rng.choice([Harm.KILL_GATEWAY] * 8 + [Harm.CUT_GATEWAY] * 3 + [Harm.STOP_GATEWAY]),
            engine="",
            lasts_s=rng.choice(LONG_S),
            delay_s=rng.choice([0.0, 0.0, 0.0005, 0.01, 0.3]),
        )
        for _ in range(rng.choice([0, 0, 1, 2]))
    )


def draw_at_handoffs(rng: Random, engines: tuple[str, ...]) -> tuple[Fault, ...]:
    """One or two at the messages of moves that hand over: at the source, the reader, the gateway or
    between them. In place of a gateway's deaths, since more of those would end a run."""
    harms = [Harm.KILL] * 3 + [Harm.STOP, Harm.CUT_LINK, Harm.KILL_GATEWAY, Harm.CUT_GATEWAY]
    return tuple(
        Fault(
            event=rng.choice(HANDOFF),
            number=rng.choice([1, 1, 2, 3, 5]),
            harm=rng.choice(harms),
            engine="" if rng.random() < 0.5 else rng.choice(engines),
            lasts_s=rng.choice(SHORT_S + LONG_S),
            delay_s=rng.choice([0.0, 0.0, 0.0005, 0.01]),
        )
        for _ in range(rng.choice([1, 2]))
    )


def _draw_at_publication(rng: Random, engines: tuple[str, ...]) -> Fault:
    """A standalone engine hangs while a version is on its way to it."""
    event = rng.choice(["Reduced", "Updated", "SaveState", "LoadVersion", "FreezeAll"])
    victim = engines[-1]
    return Fault(
        event=event,
        about=victim if event in ("LoadVersion", "FreezeAll") else "",
        number=rng.choice([1, 1, 2]),
        harm=Harm.STOP,
        engine=victim,
        lasts_s=rng.choice([3.0, 12.0, 12.0, 25.0, 40.0]),
        delay_s=rng.choice([0.0, 0.01, 0.1]),
    )


class Fate:
    """Watches a world's events and does its faults. `deaths` are where a process listened that
    was killed or has to end, and when."""

    def __init__(
        self, loop: WorldLoop, faults: tuple[Fault, ...], engines: tuple[str, ...]
    ) -> None:
        self._loop = loop
        self._left = list(faults)
        self._engines = engines
        self._counts: Counter[tuple[str, str]] = Counter()
        self.done: list[Fault] = []
        self.ending: Harm | None = None
        self.deaths: list[tuple[str, float]] = []
        self.load_factor = 1.0

    def see_write(self, end: MemoryTransport, data: bytes) -> None:
        """A frame is written; the first message in it is the event."""
        at = data.find(_TYPE)
        if at >= 0 and self._left:
            size = data[at + len(_TYPE)] & 0x1F
            name = data[at + len(_TYPE) + 1 :][:size].decode(errors="replace")
            names = [host.name for host in (end.host, end.other.host) if host is not None]
            self.happens(name, next((one for one in names if one in self._engines), ""))

    def see_work(self, name: str, host: Host | None) -> None:
        self.happens(f"work:{name}", "" if host is None else host.name)

    def see_step(self) -> None:
        if self._left:
            for fault in [one for one in self._left if one.event == "step"]:
                if self._loop.num_steps >= fault.number:
                    self._do(fault, "")

    def happens(self, event: str, who: str) -> None:
        self._counts[event, ""] += 1
        self._counts[event, who] += who != ""
        for fault in [one for one in self._left if one.event == event]:
            is_it = fault.about in ("", who)
            if is_it and self._counts[event, fault.about] == fault.number:
                self._do(fault, who)

    def _do(self, fault: Fault, who: str) -> None:
        self._left.remove(fault)
        engine = fault.engine or (who if who in self._engines else "")
        engine = engine or self._engines[self._loop.num_steps % len(self._engines)]
        if fault.delay_s > 0:
            self._loop.in_world(fault.delay_s, lambda: self._harm(fault, engine))
        else:
            self._harm(fault, engine)

    def _harm(self, fault: Fault, engine: str) -> None:
        loop, child = self._loop, self._loop.children.get(engine)
        gateway = self._gateway(fault.number)
        if child is None or gateway is None or self.ending is not None:
            return
        self.done.append(fault)
        match fault.harm:
            case Harm.KILL:
                loop.kill_host(child.host)
            case Harm.STOP:
                loop.stop_host(child.host, fault.lasts_s)
            case Harm.CUT_LINK:
                self._cut(f"/{engine}-")
            case Harm.CUT_CONTROL:
                self._cut("/controller.sock", child.host)
            case Harm.SLOW_LOADS:
                self.load_factor = 300.0
                loop.in_world(60.0, self._load_well)
            case Harm.CRASH | Harm.POWER_LOSS:
                self.ending = fault.harm
                self._crash(is_everything=fault.harm is Harm.POWER_LOSS)
            case _:
                self._harm_gateway(fault, gateway.host)

    def _harm_gateway(self, fault: Fault, host: Host) -> None:
        match fault.harm:
            case Harm.STOP_GATEWAY:
                self._loop.stop_host(host, fault.lasts_s)
            case Harm.CUT_GATEWAY:
                self.see_kill(host)
                self._cut("/controller.sock", host)
            case _:
                self._loop.kill_host(host)

    def _gateway(self, number: int) -> ChildProcess | None:
        """One of them, by the number of the event; none before all of them have started."""
        if not self._counts["OpenSession", ""]:
            return None
        children = self._loop.children
        names = [name for name in sorted(children) if name.startswith("gateway")]
        return children[names[number % len(names)]]

    def see_kill(self, host: Host) -> None:
        """Where it listened is where calls were cut."""
        listeners = self._loop.net.listeners
        places = [place for place, server in listeners.items() if server.host is host]
        self.deaths += [(place, self._loop.time()) for place in places]

    def _load_well(self) -> None:
        self.load_factor = 1.0

    def _cut(self, place: str, host: Host | None = None) -> None:
        for end in list(self._loop.net.ends):
            if place in end.name and (host is None or end.host is host):
                end.cut()

    def _crash(self, *, is_everything: bool) -> None:
        """kill -9 of the controller, and of the agents, whose watchers follow it."""
        for host in list(self._loop.hosts):
            if is_everything or host.name == "controller" or host.name.startswith("agent-"):
                self._loop.kill_host(host)
