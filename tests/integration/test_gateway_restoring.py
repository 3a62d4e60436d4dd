"""A session restored from its records goes on as one that never died, whatever was asked of it."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from cases_rig import ANSWER
from cases_speakers import BASH, SPEAKERS, Answered, Entry, Json, Results, Said, Speaker
from gateway_rig import MODEL, TOKENIZER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from opengyre.gateway.body import decode_object
from opengyre.gateway.delta import body_delta
from opengyre.gateway.dialects.registry import DIALECTS
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.request import Answer, Message, Refusal, Role, Usage
from opengyre.gateway.restoring import Earlier, restore_session
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming, Place
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord
from opengyre.trajectory.turns import ForkReason

RENDERER = load_renderer(MODEL)
NOWHERE = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
ANSWERS = [
    ANSWER,
    "Plain é text.",
    "<think>\nwhy \n\n</think>\n\nBecause.",
    '<tool_call>\n{"name": "bash", "arguments": {"timeout": 5000.0, "command": "a"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "bash", "arguments": { "command":"b" }}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "not closed}}\n</tool_call>',
    "",
]
OPENINGS = ["Do it.", "Do it.", "Summarise."]
EXTRAS: list[Json] = [
    {},
    {"temperature": 0.5},
    {"tool_choice": "required"},
    {"parallel_tool_calls": False},
]


def new_session() -> Session:
    return Session(execution="e000001", renderer=RENDERER, max_context_tokens=100_000)


def record_of(attempt: Attempt, ids: list[int], *, is_committed: bool) -> TokenRecord:
    place, incoming = attempt.place, attempt.incoming
    header = TurnRecord(
        turn=attempt.turn,
        execution=attempt.execution,
        attempt=attempt.attempt,
        parent=place.parent.turn if place.parent else "",
        fork_reason=place.fork_reason.value,
        role=incoming.role,
        protocol=incoming.protocol,
        num_kept_tokens=place.num_kept,
        num_new_prompt_tokens=len(place.prompt_ids) - place.num_kept,
        num_completion_tokens=len(ids),
        spans=[],
        finish="stop" if is_committed else "cancelled",
        is_committed=is_committed,
        ref=NOWHERE,
        received_s=0.0,
        first_token_s=0.0,
        ended_s=0.0,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=place.prompt_ids[place.num_kept :],
        completion_ids=ids,
        logprobs=[0.0] * len(ids),
        request_delta=place.delta,
    )


def what_is_told(place: Place) -> tuple[Any, ...]:
    return (
        place.parent.turn if place.parent else "",
        place.fork_reason,
        place.prompt_ids,
        place.num_kept,
        place.forced_ids,
        place.history_key,
        place.call_key,
        place.delta,
    )


@dataclass
class World:
    """One that never dies, one that does, and the records that both write."""

    living: Session = field(default_factory=new_session)
    mortal: Session = field(default_factory=new_session)
    records: list[TokenRecord] = field(default_factory=list)
    histories: list[tuple[Speaker, list[Entry], str]] = field(default_factory=list)
    abandoned: list[tuple[Speaker, Json]] = field(default_factory=list)
    last_id: str = ""

    def die(self) -> None:
        self.mortal = new_session()
        assert restore_session(self.mortal, Earlier(records=self.records)) == []

    def ask(self, speaker: Speaker, body: Json, answer: str, num_seen: int | None) -> Any:
        """The answer as its client got it, who left after `num_seen` ids; None if refused."""
        raw_body = json.dumps(body).encode()
        raw = decode_object(raw_body)
        dialect = DIALECTS[speaker.name]
        sessions = (self.living, self.mortal)
        try:
            incoming = Incoming(
                request=dialect.parse(raw),
                raw=raw,
                body=raw_body,
                protocol=speaker.name,
                role="side" if len(raw_body) % 3 == 0 else "main",
            )
            places = [one.place(incoming) for one in sessions]
        except Refusal:
            return None
        assert what_is_told(places[1]) == what_is_told(places[0])
        attempts = [one.admit(incoming, place) for one, place in zip(sessions, places, strict=True)]
        assert attempts[1].name == attempts[0].name
        ids = list(TOKENIZER.encode(answer + "<|im_end|>", add_special_tokens=False).ids)
        answered = self._end(attempts, ids[:num_seen], is_committed=num_seen is None)
        if num_seen is not None:
            self.abandoned.append((speaker, body))
        form = dialect.form(raw, incoming.request, name=attempts[0].name, created_s=0)
        whole = json.loads(form.whole(answered))
        self.last_id = str(whole["id"]) if num_seen is None else ""
        return speaker.whole(whole)

    def _end(self, attempts: list[Attempt], ids: list[int], *, is_committed: bool) -> Answer:
        parser = self.living.parser(attempts[0])
        num_fed = 0
        for token in ids:
            if parser.is_stopped:
                break
            parser.feed(token)
            num_fed += 1
        parser.finish()
        message, sampled = parser.message(), ids[:num_fed]
        self.records.append(record_of(attempts[0], sampled, is_committed=is_committed))
        for one, attempt in zip((self.living, self.mortal), attempts, strict=True):
            if is_committed:
                one.commit(attempt, completion_ids=sampled, message=message)
            else:
                one.abandon(attempt, sampled)
        usage = Usage(num_prompt_tokens=9, num_completion_tokens=num_fed)
        return Answer(message=message, ending=parser.ending(is_cut=False), usage=usage)


def go_on(history: list[Entry], reply: Any, speaker: Speaker, *, is_verbatim: bool) -> list[Entry]:
    form = reply.sent_back if is_verbatim else speaker.as_harness(reply.sent_back)
    pairs = tuple((call.call_id, f"result of {call.arguments}") for call in reply.calls)
    after = Results(pairs=pairs) if pairs else Said(role="user", text="Go on.")
    return [*history, Answered(form=form), after]


class Course:
    """What is drawn at each step."""

    def __init__(self, data: st.DataObject) -> None:
        self.world = World()
        self._data = data

    def _of(self, items: list[Any]) -> Any:
        return self._data.draw(st.sampled_from(items))

    def step(self) -> None:
        world = self.world
        if self._of([False, False, True]):
            world.die()
        kinds = ["open"] + ["go on"] * 4 * bool(world.histories) + ["retry"] * bool(world.abandoned)
        match self._of(kinds):
            case "open":
                history = [Said(role="system", text="Act."), Said(role="user", text="Do it.")]
                self._ask(self._of(list(SPEAKERS)), history[self._of([0, 1]) :])
            case "go on":
                self._ask(*self._of(world.histories))
            case _:
                speaker, body = self._of(world.abandoned)
                world.ask(speaker, body, self._of(ANSWERS), self._of([None, None, 4]))

    def _ask(self, speaker: Speaker, history: list[Entry], previous: str = "") -> None:
        is_named = speaker.name == "openai-responses" and previous and self._of([True, False])
        sent = history[-1:] if is_named else history
        body = speaker.body(sent, stream=False, tools=self._of([(BASH,)] * 5 + [()]))
        if speaker.name == "openai-chat":
            body |= self._of(EXTRAS)
        if is_named:
            body |= {"previous_response_id": previous, **self._of([{}, {"instructions": "New."}])}
        num_seen = self._of([None] * 5 + [0, 3, 25, 40, 60])
        reply = self.world.ask(speaker, body, self._of(ANSWERS), num_seen)
        if reply is not None:
            longer = go_on(history, reply, speaker, is_verbatim=self._of([True, False]))
            self.world.histories.append((speaker, longer, self.world.last_id))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_course_goes_on_after_any_death_as_if_there_was_none(data: st.DataObject) -> None:
    course = Course(data)
    for _ in range(data.draw(st.integers(3, 10))):
        course.step()


def placed(session: Session, *texts: str) -> Attempt:
    """One more chat request, in which user and model said `texts` in turn."""
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = json.dumps({"messages": messages}).encode()
    raw = decode_object(body)
    incoming = Incoming(
        request=DIALECTS["openai-chat"].parse(raw),
        raw=raw,
        body=body,
        protocol="openai-chat",
    )
    return session.admit(incoming, session.place(incoming))


def kept(session: Session, attempt: Attempt, *, is_committed: bool) -> TokenRecord:
    ids = list(TOKENIZER.encode("ok<|im_end|>", add_special_tokens=False).ids)
    if is_committed:
        message = Message(role=Role.ASSISTANT, text="ok")
        session.commit(attempt, completion_ids=ids, message=message)
    else:
        session.abandon(attempt, ids)
    return record_of(attempt, ids, is_committed=is_committed)


@pytest.mark.parametrize("is_late", [False, True], ids=["in order", "the first one is kept last"])
def test_a_retry_that_was_made_is_not_made_again(is_late: bool) -> None:
    session = new_session()
    first = kept(session, placed(session, "a"), is_committed=False)
    second = kept(session, placed(session, "a"), is_committed=True)
    again = new_session()
    records = [second, first] if is_late else [first, second]
    assert restore_session(again, Earlier(records=records)) == []
    third = placed(again, "a")
    assert (third.turn, third.attempt) == ("e000001.t2", 0)


def test_an_answer_that_nobody_may_have_got_is_tried_again_as_the_same_turn() -> None:
    session = new_session()
    records = [kept(session, placed(session, text), is_committed=True) for text in "ab"]
    again = new_session()
    restore_session(again, Earlier(records=records, num_undelivered=1))
    assert placed(again, "a").name == "e000001.t3.a0"
    retry = placed(again, "b")
    assert retry.name == "e000001.t2.a1"
    records.append(kept(again, retry, is_committed=True))
    assert placed(again, "b").name == "e000001.t4.a0"
    third = new_session()
    restore_session(third, Earlier(records=records))
    assert placed(third, "b").name == "e000001.t3.a0"


def test_who_goes_on_from_an_answer_has_got_it() -> None:
    session = new_session()
    record = kept(session, placed(session, "a"), is_committed=True)
    again = new_session()
    restore_session(again, Earlier(records=[record], num_undelivered=1))
    after = placed(again, "a", "ok", "more")
    assert after.place.parent is again.node("e000001.t1")
    assert after.place.fork_reason is ForkReason.NONE
    assert placed(again, "a").name == "e000001.t3.a0"


def test_a_retry_in_flight_at_the_death_is_the_same_attempt_when_it_comes_again() -> None:
    session = new_session()
    first = kept(session, placed(session, "a"), is_committed=False)
    in_flight = placed(session, "a")
    again = new_session()
    restore_session(again, Earlier(records=[first]))
    assert placed(again, "a").name == in_flight.name == "e000001.t1.a1"


def test_a_lost_record_takes_its_descendants_and_no_number_is_given_twice() -> None:
    session = new_session()
    records = [kept(session, placed(session, text), is_committed=True) for text in "abc"]
    child = record_of(placed(session, "a"), [1, 2], is_committed=True)
    child = replace(child, header=replace(child.header, turn="e000001.t7", parent="e000001.t2"))
    root = records[0]
    foreign = replace(root, header=replace(root.header, turn="e000001.t3", protocol="gopher"))
    broken = replace(root, request_delta=body_delta(b"[]", b""))
    again = new_session()
    assert restore_session(again, Earlier(records=[broken, foreign, child])) == [
        "e000001.t1 attempt 0: the body must be a JSON object",
        "e000001.t3 attempt 0: tokens: its protocol gopher is not known",
        "e000001.t7 attempt 0: tokens: its parent e000001.t2 is not restored",
    ]
    assert placed(again, "a").turn == "e000001.t8"


def test_bodies_are_the_clients_bytes_after_a_death() -> None:
    world = World()
    history: list[Entry] = [Said(role="user", text="Do it.")]
    bodies = []
    for _ in range(12):
        bodies.append(json.dumps(SPEAKERS[2].body(history, stream=False, tools=(BASH,))).encode())
        reply = world.ask(SPEAKERS[2], json.loads(bodies[-1]), ANSWER, None)
        history = go_on(history, reply, SPEAKERS[2], is_verbatim=False)
        world.die()
    for number, body in enumerate(bodies, start=1):
        assert world.mortal.body(world.mortal.node(f"e000001.t{number}")) == body
