"""A session of each family: what a harness sends back attaches to what was sampled."""

import json

import pytest
from families_under_test import NAMES, renderer_of
from family_answers import TOOLS, USER, Said, completion, fitted
from msgspec import structs

from opengyre.gateway.request import Call, Message, Request, Role
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming, full_ids
from opengyre.trajectory.turns import ForkReason

TURNS = (
    Said(calls=(("bash", {"command": "ls  ", "count": 5000.0}),)),
    Said(reasoning="two\n", calls=(("edit_file", {"command": "é", "more": {}}), ("bash", {}))),
    Said(text="Done."),
)


def admit(one: Session, messages: list[Message]) -> Attempt:
    request = Request(model="m", messages=tuple(messages), tools=tuple(TOOLS))
    body = repr(messages).encode()
    incoming = Incoming(request=request, raw={}, body=body, protocol="openai-chat")
    return one.admit(incoming, one.place(incoming))


def answered(one: Session, attempt: Attempt, ids: list[int]) -> Message:
    parser = one.parser(attempt)
    parser.feed_all(ids)
    parser.finish()
    one.commit(attempt, completion_ids=ids, message=parser.message())
    return parser.message()


def sent_back(message: Message, is_trimmed: bool) -> Message:
    """As harnesses do: keys in another order, numbers normalised, reasoning trimmed or dropped."""
    reasoning = (message.reasoning or "").strip() if is_trimmed else None
    return structs.replace(message, reasoning=reasoning, calls=tuple(map(rewritten, message.calls)))


def rewritten(call: Call) -> Call:
    arguments = json.loads(call.arguments)
    members = dict(reversed(arguments.items()))
    if members.get("count") == 5000.0:
        members["count"] = 5000
    return structs.replace(call, arguments=json.dumps(members, separators=(",", ":")))


@pytest.mark.parametrize("is_trimmed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_each_turn_of_a_session_grows_from_the_one_before(name: str, is_trimmed: bool) -> None:
    one = Session(execution="e1", renderer=renderer_of(name), max_context_tokens=100_000)
    messages, before = [USER], None
    for said in TURNS:
        attempt = admit(one, messages)
        is_anew = name == "deepseek-v4" and len(messages) > 3  # two results at once
        wanted = ForkReason.NO_BRIDGE if is_anew else ForkReason.NONE
        assert attempt.place.fork_reason is wanted
        if before is not None and not is_anew:
            assert attempt.place.prompt_ids[: len(before)] == before
        message = answered(one, attempt, completion(name, fitted(name, said)))
        node = one.node(attempt.turn)
        assert node is not None
        before = full_ids(node)
        results = [
            Message(role=Role.TOOL, text=f"result of {call.call_id}", call_id=call.call_id)
            for call in reversed(message.calls)  # in the order they were done
        ]
        messages = [*messages, sent_back(message, is_trimmed), *(results or [USER])]
    last = admit(one, messages)
    assert last.place.fork_reason is ForkReason.NONE
    assert last.place.prompt_ids[: len(before or [])] == before
