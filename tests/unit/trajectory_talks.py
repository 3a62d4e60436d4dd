"""A random harness before a real gateway session, and what its engines were truly given.

Must not know how a tree is built. The parent of a call is told to the processor by its name; the
truth goes by the very turn object that the session attached it to.
"""

import json
import random
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.request import Message, Request
from opengyre.gateway.request import Role as Speaker
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming, Node
from opengyre.trajectory.turns import Role, TurnTokens
from tests.unit.trajectory_worlds import SUMMARY_OF, Seen, seen_of, spans_of

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
RENDERER = load_renderer(MODEL)
WORDS = ("look at the file", "run it again", "it fails", "done, I think", "what now", "yes")


@dataclass(slots=True, kw_only=True, eq=False)
class Talk:
    """A conversation of the harness."""

    role: Role
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call in flight; its answer goes to `talk`, if any."""

    attempt: Attempt
    messages: tuple[Message, ...]
    talk: Talk | None


@dataclass(slots=True, kw_only=True)
class Talks:
    """`seen` in the order in which records are written: that of the calls' ends."""

    rng: random.Random
    session: Session
    seen: list[Seen] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)
    in_flight: list[Asked] = field(default_factory=list)
    _seen_of: dict[Node, Seen] = field(default_factory=dict)

    def words(self) -> str:
        return f"{self.rng.choice(WORDS)} {self.rng.randint(0, 99)}"

    def user(self) -> Message:
        return Message(role=Speaker.USER, text=self.words())

    def ask(self, messages: tuple[Message, ...], role: Role, talk: Talk | None = None) -> Asked:
        body = json.dumps([role, *(repr(message) for message in messages)]).encode()
        incoming = Incoming(
            request=Request(model="m", messages=messages),
            raw={"user": role},
            body=body,
            protocol="openai-chat",
            role=role,
        )
        attempt = self.session.admit(incoming, self.session.place(incoming))
        asked = Asked(attempt=attempt, messages=messages, talk=talk)
        self.in_flight.append(asked)
        return asked

    def end(self, asked: Asked, text: str, *, is_told: bool = True) -> Message:
        """The call ends with `text`; returns what its client has of the answer."""
        self.in_flight.remove(asked)
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        parser = self.session.parser(asked.attempt)
        parser.feed_all(ids)
        parser.finish()
        self._keep(asked.attempt, ids, is_committed=is_told)
        if is_told:
            message = parser.message()
            node = self.session.commit(asked.attempt, completion_ids=ids, message=message)
            self._seen_of[node] = self.seen[-1]
        else:
            self.session.abandon(asked.attempt, ids)
        return parser.message()

    def _keep(self, attempt: Attempt, ids: list[int], *, is_committed: bool) -> None:
        place = attempt.place
        record = TurnTokens(
            turn=attempt.turn,
            attempt=attempt.attempt,
            parent=place.parent.turn if place.parent else "",
            parent_attempt=place.parent.attempt if place.parent else None,
            fork_reason=place.fork_reason,
            role=Role(attempt.incoming.role),
            is_committed=is_committed,
            num_kept_tokens=place.num_kept,
            new_prompt_ids=place.prompt_ids[place.num_kept :],
            completion_ids=ids,
            logprobs=[-self.rng.randint(1, 64) / 64 for _ in ids],
            spans=spans_of(self.rng, len(ids)),
        )
        seen = seen_of(record, self._seen_of[place.parent] if place.parent else None)
        self.seen.append(changed(seen, ids=(*place.prompt_ids, *ids)))

    def end_one(self) -> None:
        """Any call in flight ends; its client goes on from the answer, or asks again."""
        asked = self.rng.choice(self.in_flight)
        thought = f"<think>\n{self.words()}\n</think>\n\n" if self.rng.random() < 0.4 else ""
        text = self.rng.choices([thought + self.words(), thought, ""], [8, 1, 1])[0]
        is_told = self.rng.random() < 0.8
        is_whole = is_told and self.rng.random() < 0.9
        message = self.end(asked, text + "<|im_end|>" * is_whole, is_told=is_told)
        if asked.talk is None:
            return
        is_lost = self.rng.random() < (0.1 if is_told else 0.6)
        if not is_lost:
            asked.talk.messages = (*asked.messages, message, self.user())
            return
        self.ask_again(asked, message, is_told=is_told)

    def ask_again(self, asked: Asked, message: Message, *, is_told: bool) -> None:
        """If it was told after all, another part of the harness may go on from it."""
        assert asked.talk is not None
        if is_told:
            self.session.expect_retry(asked.attempt)
        self.ask(asked.messages, asked.talk.role, asked.talk)
        if is_told and self.rng.random() < 0.5:
            history = (*asked.messages, message, self.user())
            self.talks.append(Talk(role=asked.talk.role, messages=history))

    def act(self) -> None:
        acts = [self.go_on, self.rewrite, self.rethink, self.compact, self.spawn, self.side]
        (act,) = self.rng.choices(acts, [50, 6, 6, 6, 8, 6])
        act(self.rng.choice(self.talks))

    def go_on(self, talk: Talk) -> None:
        self.ask(talk.messages, talk.role, talk)

    def rewrite(self, talk: Talk) -> None:
        at = self.rng.randrange(len(talk.messages))
        self._change(talk, at, replace(talk.messages[at], text=self.words()))

    def rethink(self, talk: Talk) -> None:
        thinking = [at for at, message in enumerate(talk.messages) if message.reasoning]
        if thinking:
            at = self.rng.choice(thinking)
            thought = self.rng.choice(["", "another thought"])
            self._change(talk, at, replace(talk.messages[at], reasoning=thought))

    def _change(self, talk: Talk, at: int, message: Message) -> None:
        talk.messages = (*talk.messages[:at], message, *talk.messages[at + 1 :])
        self.go_on(talk)

    def compact(self, talk: Talk) -> None:
        request = Message(role=Speaker.USER, text="Sum it up.")
        self.ask((*talk.messages, request), SUMMARY_OF[talk.role])
        talk.messages = (talk.messages[0], self.user())

    def spawn(self, talk: Talk) -> None:
        self.talks.append(Talk(role=Role.SUB_AGENT, messages=(self.user(),)))

    def side(self, talk: Talk) -> None:
        self.ask((*talk.messages, self.user()), Role.SIDE)


def new_talks(seed: int) -> Talks:
    session = Session(execution="e1", renderer=RENDERER, max_context_tokens=1 << 20)
    talks = Talks(rng=random.Random(seed), session=session)
    talks.talks.append(Talk(role=Role.MAIN, messages=(talks.user(),)))
    return talks


def made_talks(seed: int, num_acts: int = 25) -> Talks:
    talks = new_talks(seed)
    for _ in range(num_acts):
        talks.act()
        while len(talks.in_flight) > talks.rng.randint(0, 2):
            talks.end_one()
    while talks.in_flight:
        talks.end_one()
    return talks
