"""Where a request attaches in an execution's tree of turns, without HTTP."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from opengyre.gateway.delta import restore_body
from opengyre.gateway.history import Keys, is_same_reasoning
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.request import Call, Message, Refusal, Request, Role
from opengyre.gateway.sessions import Session
from opengyre.gateway.turns import Attempt, Incoming, Node, full_ids
from opengyre.trajectory.turns import ForkReason

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
RENDERER = load_renderer(MODEL)
KEYS = Keys(())
USER = Message(role=Role.USER, text="Do it.")
CALLED = Call(call_id="call_1", name="bash", arguments='{"n":  5000.0, "a": "\\u00e9"}')


def session(max_context_tokens: int = 4096) -> Session:
    return Session(execution="e1", renderer=RENDERER, max_context_tokens=max_context_tokens)


def call(arguments: str, call_id: str = "call_1") -> Call:
    return Call(call_id=call_id, name="bash", arguments=arguments)


def admit(one: Session, *messages: Message, name: str = "") -> Attempt:
    body = json.dumps([name, *(repr(m) for m in messages)]).encode()
    request = Request(model="m", messages=messages)
    incoming = Incoming(request=request, raw={"user": name}, body=body, protocol="openai-chat")
    return one.admit(incoming, one.place(incoming))


def commit(one: Session, attempt: Attempt, message: Message, sampled: str) -> Node:
    ids = TOKENIZER.encode(sampled + "<|im_end|>", add_special_tokens=False).ids
    return one.commit(attempt, completion_ids=ids, message=message)


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, text=text)


def test_an_extension_keeps_every_token_of_its_parent() -> None:
    one = session()
    first = commit(one, admit(one, USER), said("ok"), "  ok\n")
    second = admit(one, USER, said("ok"), replace(USER, text="More."))
    assert second.place.parent is first
    assert second.place.fork_reason is ForkReason.NONE
    assert second.place.prompt_ids[: second.place.num_kept] == full_ids(first)
    assert (second.turn, second.attempt) == ("e1.t2", 0)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ("half a sen", said("half a sen")),
        ("<think>\nhalf a tho", replace(said(""), reasoning="half a tho")),
        ('<tool_call>\n{"name": "bash", "argu', replace(said(""), calls=(call("{"),))),
    ],
)
def test_a_turn_cut_by_its_budget_is_closed_as_context_of_the_next(
    sampled: str, message: Message
) -> None:
    one = session()
    ids = TOKENIZER.encode(sampled, add_special_tokens=False).ids
    cut = one.commit(admit(one, USER), completion_ids=ids, message=message)
    after = admit(one, USER, message, replace(USER, text="Go on."))
    assert after.place.parent is cut
    assert after.place.num_kept == len(full_ids(cut))
    new_text = TOKENIZER.decode(
        after.place.prompt_ids[after.place.num_kept :], skip_special_tokens=False
    )
    assert "<|im_end|>\n<|im_start|>user\nGo on." in new_text


def test_two_branches_may_grow_from_one_turn() -> None:
    one = session()
    first = commit(one, admit(one, USER), said("ok"), "ok")
    left = admit(one, USER, said("ok"), replace(USER, text="left"))
    right = admit(one, USER, said("ok"), replace(USER, text="right"))
    assert left.place.parent is right.place.parent is first
    assert left.place.fork_reason is right.place.fork_reason is ForkReason.NONE


def test_rewritten_reasoning_forks_and_dropped_or_trimmed_reasoning_does_not() -> None:
    one = session()
    thought = replace(said("ok"), reasoning="hm\n")
    commit(one, admit(one, USER), thought, "<think>\nhm\n\n</think>\n\nok")
    for reasoning in (None, "", "hm", "hm\n"):
        again = admit(one, USER, replace(thought, reasoning=reasoning), USER)
        assert again.place.fork_reason is ForkReason.NONE
    other = admit(one, USER, replace(thought, reasoning="other"), USER)
    assert other.place.fork_reason is ForkReason.REWRITTEN_REASONING


def test_a_fork_restores_our_calls_as_they_were_sampled() -> None:
    one = session()
    message = replace(said(""), calls=(CALLED,))
    sampled = f'<tool_call>\n{{"name": "bash", "arguments": {CALLED.arguments}}}\n</tool_call>'
    first = commit(one, admit(one, USER), message, sampled)
    rewritten = replace(CALLED, arguments='{"a":"é","n":5000}')
    result = Message(role=Role.TOOL, text="done", call_id="call_1")
    changed_root = replace(USER, text="Do it. (reminder)")
    fork = admit(one, changed_root, replace(message, calls=(rewritten,)), result)
    assert fork.place.fork_reason is ForkReason.REWRITTEN_TURN
    assert CALLED.arguments in TOKENIZER.decode(fork.place.prompt_ids, skip_special_tokens=False)
    assert fork.place.parent is first
    attached = admit(one, USER, replace(message, calls=(rewritten,)), result)
    assert attached.place.parent is first
    assert attached.place.fork_reason is ForkReason.NONE


def test_a_retry_needs_an_abandoned_attempt_and_uses_it_up() -> None:
    one = session()
    first = admit(one, USER, name="a")
    assert admit(one, USER, name="a").turn == "e1.t2"
    one.abandon(first, [])
    one.abandon(first, [])
    again = admit(one, USER, name="a")
    assert (again.turn, again.attempt) == ("e1.t1", 1)
    assert again.place.prompt_ids == first.place.prompt_ids
    assert (admit(one, USER, name="a").turn, one.num_turns) == ("e1.t3", 3)


def test_a_prompt_without_room_takes_no_turn_number() -> None:
    one = session(max_context_tokens=12)
    with pytest.raises(Refusal) as refused:
        admit(one, replace(USER, text="word " * 50))
    assert refused.value.code == "context_length_exceeded"
    assert one.num_turns == 0


def test_chains_of_new_roots_stay_short() -> None:
    one = session()
    for k in range(30):
        node = commit(one, admit(one, replace(USER, text=f"task {k}")), said("ok"), "ok")
    depth, at = 0, node
    while at.parent is not None:
        depth, at = depth + 1, at.parent
    assert depth <= 4


def test_bodies_older_than_the_kept_ones_are_restored_through_their_deltas() -> None:
    one = session()
    first = admit(one, USER, name="a")
    commit(one, first, said("zero"), "zero")
    for k in range(10):
        attempt = admit(one, replace(USER, text=f"other {k}"), name=f"o{k}")
        commit(one, attempt, said(f"other {k}"), "x")
    late = admit(one, USER, said("zero"), USER, name="late")
    assert late.place.parent is not None
    assert late.place.parent.turn == first.turn
    assert restore_body(late.place.delta, first.incoming.body) == late.incoming.body


def test_meaningless_differences_make_no_other_history() -> None:
    for one, two in [
        (CALLED.arguments, '{"a":"é","n":5000}'),
        ("", "{}"),
        ('{"a": 1.50}', '{"a": 1.5}'),
        ("not json", "not json"),
    ]:
        assert KEYS.is_same_call(replace(CALLED, arguments=one), call(two, call_id="x"))
    for one, two in [
        (CALLED.arguments, '{"a":"é","n":5001}'),
        ("true", "1"),
        ("null", "{}"),
        ("not json", '"not json"'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
    ]:
        assert not KEYS.is_same_call(call(one), call(two))
    assert not KEYS.is_same_call(CALLED, replace(CALLED, name="other"))
    assert is_same_reasoning(" a ", "a\n")
    assert not is_same_reasoning("a", None)


def sampled(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


FIRST = '<think>\nhm\n</think>\n\nlook<tool_call>\n{"name": "bash", "arguments": {"n": 5000.0}}\n'
KEPT = FIRST + "</tool_call>"
CUT = KEPT + '\n<tool_call>\n{"name": "bash", "argu'


def cut_answer(one: Session) -> tuple[Attempt, Message]:
    """An attempt whose answer broke off in its second call, and what a client keeps of it."""
    attempt = admit(one, USER)
    one.abandon(attempt, sampled(CUT))
    return attempt, replace(said("look"), calls=(call('{"n":5000}'),))


def test_whole_parts_of_a_cut_answer_are_the_tokens_of_the_next_prompt() -> None:
    one = session()
    first, kept = cut_answer(one)
    result = Message(role=Role.TOOL, text="ok", call_id="call_1")
    grown = admit(one, USER, kept, result, name="grown")
    before = first.place.prompt_ids + sampled(KEPT + "\n")
    assert grown.place.prompt_ids[: len(before)] == before
    assert grown.place.fork_reason is ForkReason.KEPT_PARTS
    assert (grown.turn, grown.attempt) == ("e1.t2", 0)
    after = TOKENIZER.decode(grown.place.prompt_ids[len(before) :], skip_special_tokens=False)
    assert after.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nok")


THOUGHT = replace(said(""), reasoning="hm")


@pytest.mark.parametrize(
    ("kept", "ids"),
    [
        (replace(said("look"), calls=(call('{"n":5000}'),)), KEPT + "\n"),
        (replace(THOUGHT, text="look"), FIRST[: FIRST.index("<tool_call>")]),
        (THOUGHT, "<think>\nhm\n</think>"),
    ],
)
def test_a_cut_answer_with_nothing_after_it_is_gone_on_with(kept: Message, ids: str) -> None:
    one = session()
    first, _ = cut_answer(one)
    assert admit(one, USER, kept).place.prompt_ids == first.place.prompt_ids + sampled(ids)


def test_another_answer_than_the_one_that_was_cut_is_no_part_of_it() -> None:
    one = session()
    _, kept = cut_answer(one)
    for other in [replace(kept, text="other"), said("loo"), said("")]:
        assert admit(one, USER, other, USER).place.fork_reason is not ForkReason.KEPT_PARTS


def test_another_attempt_of_an_undelivered_turn_keeps_nothing_of_the_first() -> None:
    one = session()
    root = commit(one, admit(one, USER), said("ok"), "ok")
    later = replace(USER, text="More.")
    for messages, parent in [((USER, said("ok"), later), root), ((later,), root)]:
        first = admit(one, *messages, name="again")
        commit(one, first, said("yes"), "yes")
        one.expect_retry(first)
        second = admit(one, *messages, name="again")
        assert (second.turn, second.attempt) == (first.turn, 1)
        assert second.place.parent is parent
        assert second.place.num_kept <= parent.num_tokens
        body = restore_body(second.place.delta, one.body(parent))
        assert body == second.incoming.body
