"""Made-up records of a harness that rewrites, retries, compacts, calls sub-agents and dies, with
the truth of every attempt beside what the processor is told of it.

Must not know how a tree is built: the truth is kept as whole lists, one per attempt.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from opengyre.trajectory.account import Reason
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import TRAINED_ROLES, ForkReason, Role, SampledSpan, TurnTokens

ENGINES = ("standalone-0", "cell-1", "cell-2")
SUMMARY_OF = {Role.MAIN: Role.MAIN_SUMMARY, Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY}

Token = tuple[str, int, int]
"""A token's name: turn, attempt, and its place among what that attempt was first to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who made a token; `engine` is "" of an injected one."""

    token: Token
    role: Role
    engine: str = ""
    version: int = -1
    logprob: float = 0.0

    @property
    def is_sampled(self) -> bool:
        return bool(self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One attempt as it was: `ids` are all that its engine was given, then what it sampled."""

    record: TurnTokens
    ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    above: "Seen | None" = None

    @property
    def own(self) -> tuple[Origin, ...]:
        return self.origins[self.record.num_kept_tokens :]

    @property
    def sampled(self) -> tuple[Origin, ...]:
        return tuple(origin for origin in self.own if origin.is_sampled)


def spans_of(rng: random.Random, num_tokens: int) -> tuple[SampledSpan, ...]:
    """Cut anywhere: an answer is continued by other engines, at later versions."""
    cuts = sorted({0, num_tokens, *(rng.randint(0, num_tokens) for _ in range(rng.randint(0, 2)))})
    version = rng.randint(0, 3)
    spans = []
    for start, end in pairwise(cuts):
        engine = rng.choice(ENGINES)
        spans.append(SampledSpan(start=start, end=end, version=version, engine=engine))
        version += rng.randint(0, 1)
    return tuple(spans)


def seen_of(record: TurnTokens, above: Seen | None) -> Seen:
    """The truth of `record`, whose prompt begins with tokens of `above`."""
    kept = record.num_kept_tokens
    ids = above.ids[:kept] if above else ()
    origins = above.origins[:kept] if above else ()
    num_new = len(record.new_prompt_ids)
    name = (record.turn, record.attempt)
    injected = [Origin(token=(*name, at), role=record.role) for at in range(num_new)]
    sampled = [
        Origin(
            token=(*name, num_new + at),
            role=record.role,
            engine=span.engine,
            version=span.version,
            logprob=record.logprobs[at],
        )
        for span in record.spans
        for at in range(span.start, span.end)
    ]
    return Seen(
        record=record,
        ids=(*ids, *record.new_prompt_ids, *record.completion_ids),
        origins=(*origins, *injected, *sampled),
        above=above,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Agent:
    role: Role
    last: Seen | None = None


@dataclass(slots=True, kw_only=True)
class World:
    """Makes up records; no two tokens of it have one id, but for the prompts of retries."""

    rng: random.Random
    is_labelled: bool = True
    seen: list[Seen] = field(default_factory=list)
    launch: int = 1
    agents: list[Agent] = field(default_factory=list)
    standing: dict[str, Seen] = field(default_factory=dict)
    _num_turns: int = 0
    _num_ids: int = 0

    def fresh(self, num_ids: int) -> list[int]:
        first = self._num_ids
        self._num_ids += num_ids
        return list(range(first, first + num_ids))

    def record(self, role: Role, *, kept: int, reason: ForkReason, num_new: int) -> TurnTokens:
        """The first attempt of a new turn."""
        self._num_turns += 1
        completion_ids = self.fresh(self.rng.choice([0, 1, 2, 3, 5, 8]))
        return TurnTokens(
            turn=f"e1.t{self._num_turns}",
            attempt=0,
            parent="",
            fork_reason=reason,
            role=role if self.is_labelled else Role.MAIN,
            is_committed=True,
            num_kept_tokens=kept,
            new_prompt_ids=self.fresh(num_new),
            completion_ids=completion_ids,
            logprobs=[-self.rng.randint(1, 64) / 64 for _ in completion_ids],
            spans=spans_of(self.rng, len(completion_ids)),
            launch=self.launch,
        )

    def again(self, record: TurnTokens, **changes: object) -> TurnTokens:
        """Its next attempt: the same prompt, another answer."""
        completion_ids = self.fresh(self.rng.randint(0, 5))
        following = replace(
            record,
            attempt=record.attempt + 1,
            completion_ids=completion_ids,
            logprobs=[-self.rng.randint(1, 64) / 64 for _ in completion_ids],
            spans=spans_of(self.rng, len(completion_ids)),
        )
        return replace(following, **changes)  # type: ignore[arg-type]

    def tell(self, record: TurnTokens, above: Seen | None) -> Seen:
        """The record is durable. It names any turn of the line that has what it keeps, and of it
        the attempt, unless the one that stands is meant."""
        while (
            above
            and record.num_kept_tokens <= above.record.num_kept_tokens
            and self.rng.random() < 0.7
        ):
            above = above.above
        is_named = above is not None and (not self.stands(above) or self.rng.random() < 0.5)
        named = replace(
            record,
            parent=above.record.turn if above else "",
            parent_attempt=above.record.attempt if above and is_named else None,
        )
        seen = seen_of(named, above)
        self.seen.append(seen)
        if record.is_committed:
            self.standing[record.turn] = seen
        return seen

    def stands(self, seen: Seen) -> bool:
        return self.standing.get(seen.record.turn) is seen

    def call(self, agent: Agent, role: Role, *, kept: int, reason: ForkReason) -> Seen:
        """A new turn, tried until it is answered."""
        above = agent.last
        num_new = self.rng.choice([0, 1, 2, 4]) if kept else self.rng.choice([0, 2, 5])
        record = self.record(role, kept=kept, reason=reason, num_new=num_new)
        late: list[TurnTokens] = []
        while self.rng.random() < 0.15:
            cut = replace(record, is_committed=False)
            if self.rng.random() < 0.3:
                late.append(cut)
            else:
                self.tell(cut, above)
            record = self.again(record)
        told = self.tell(record, above)
        for cut in late:
            self.tell(cut, above)
        return told

    def go_on(self, agent: Agent) -> None:
        kept = len(agent.last.ids) if agent.last else 0
        agent.last = self.call(agent, agent.role, kept=kept, reason=self._reason(agent))

    def _reason(self, agent: Agent) -> ForkReason:
        is_first = not any(seen.record.launch == self.launch for seen in self.seen)
        return ForkReason.NONE if agent.last or is_first else ForkReason.NEW_ROOT

    def fork(self, agent: Agent) -> None:
        """History is rewritten, anywhere in it."""
        if agent.last is None:
            return
        reasons = [ForkReason.REWRITTEN_TURN, ForkReason.REWRITTEN_REASONING, ForkReason.NO_BRIDGE]
        kept = self.rng.randint(0, len(agent.last.ids))
        agent.last = self.call(agent, agent.role, kept=kept, reason=self.rng.choice(reasons))

    def resend(self, agent: Agent) -> None:
        """The client never had the answer that was told, and asks again."""
        line, at = [], agent.last
        while at is not None:
            line += [at] if self.stands(at) else []
            at = at.above
        if not line:
            return
        old = self.rng.choice(line)
        is_committed = self.rng.random() < 0.7
        tried = [one.record.attempt for one in self.seen if one.record.turn == old.record.turn]
        record = self.again(old.record, is_committed=is_committed)
        new = self.tell(replace(record, attempt=max(tried) + 1), old.above)
        for one in self.agents:
            if is_committed and one.last is old and self.rng.random() < 0.7:
                one.last = new

    def drop(self, agent: Agent) -> None:
        """An answer is cut and nobody asks again, or it or its whole parts are gone on from."""
        above = agent.last
        kept = len(above.ids) if above else 0
        record = self.record(agent.role, kept=kept, reason=self._reason(agent), num_new=2)
        cut = self.tell(replace(record, is_committed=False), above)
        if above is None or self.rng.random() < 0.5:
            agent.last = cut if self.rng.random() < 0.3 else above
            return
        parts = record.completion_ids[: self.rng.randint(0, len(record.completion_ids))]
        new = self.record(agent.role, kept=kept, reason=ForkReason.KEPT_PARTS, num_new=1)
        new = replace(new, new_prompt_ids=[*record.new_prompt_ids, *parts, *new.new_prompt_ids])
        agent.last = self.tell(new, above)

    def side(self, agent: Agent) -> None:
        kept = self.rng.randint(0, len(agent.last.ids)) if agent.last else 0
        aside = self.call(agent, Role.SIDE, kept=kept, reason=ForkReason.NEW_ROOT)
        agent.last = aside if self.rng.random() < 0.2 else agent.last

    def compact(self, agent: Agent) -> None:
        if agent.last is None:
            return
        summary = SUMMARY_OF[agent.role]
        after = self.call(agent, summary, kept=len(agent.last.ids), reason=ForkReason.NONE)
        agent.last = after
        kept = self.rng.choice([0, min(2, len(after.ids))])
        agent.last = self.call(agent, agent.role, kept=kept, reason=ForkReason.NEW_ROOT)

    def spawn(self, agent: Agent) -> None:
        """Its first call shares the beginning of its caller's, or nothing."""
        one = Agent(role=Role.SUB_AGENT, last=agent.last if self.rng.random() < 0.5 else None)
        kept = min(2, len(one.last.ids)) if one.last else 0
        one.last = self.call(one, one.role, kept=kept, reason=ForkReason.NEW_ROOT)
        self.agents.append(one)

    def relaunch(self, agent: Agent) -> None:
        self.launch += 1
        self.standing.clear()
        self.agents = [Agent(role=Role.MAIN)]
        self.go_on(self.agents[0])


def made_world(seed: int, num_acts: int = 25) -> World:
    """Several agents act in turn."""
    rng = random.Random(seed)
    world = World(rng=rng, is_labelled=seed % 4 != 0)
    world.agents.append(Agent(role=Role.MAIN))
    acts: list[tuple[Callable[[Agent], None], int]] = [
        (world.go_on, 40),
        (world.fork, 10),
        (world.resend, 6),
        (world.drop, 6),
        (world.side, 6),
        (world.compact, 8),
        (world.spawn, 10),
        (world.relaunch, 2),
    ]
    names, weights = zip(*acts, strict=True)
    world.go_on(world.agents[0])
    for _ in range(rng.randint(1, num_acts)):
        (act,) = rng.choices(names, weights)
        act(rng.choice(world.agents))
    return world


def tree_of(seen: Sequence[Seen]) -> Tree:
    tree = Tree()
    for one in seen:
        tree.insert(one.record)
    return tree


def ends_of(
    seen: Sequence[Seen], trained_roles: Sequence[Role] = TRAINED_ROLES
) -> dict[Token, Reason | None]:
    """Of each sampled token why it cannot be trained, None if it can."""
    launch = seen[-1].record.launch
    last = {one.record.turn: one.record.attempt for one in seen if one.record.is_committed}
    ends: dict[Token, Reason | None] = {}
    for one in seen:
        record = one.record
        for origin in one.sampled:
            reason = None
            if record.launch < launch:
                reason = Reason.RELAUNCHED
            elif not record.is_committed:
                reason = Reason.NOT_COMMITTED
            elif record.attempt != last[record.turn]:
                reason = Reason.SUPERSEDED_ATTEMPT
            elif record.role not in trained_roles:
                reason = Reason.UNTRAINED_ROLE
            elif one.origins[0] is origin:
                reason = Reason.NO_CONTEXT
            ends[origin.token] = reason
    return ends


def leaves_of(seen: Sequence[Seen], ends: dict[Token, Reason | None]) -> list[Seen]:
    """Attempts with tokens to train whose whole line is in the line of no other such attempt."""
    able = [one for one in seen if any(ends[origin.token] is None for origin in one.sampled)]
    tokens = Counter(origin.token for one in able for origin in one.origins)
    return [one for one in able if tokens[one.origins[-1].token] == 1]
