"""An execution's turns as a tree: exact lines, provenance, standing attempts, words of forks."""

import sys
import tracemalloc
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import pytest

from opengyre.trajectory.account import Reason
from opengyre.trajectory.tree import Fork, Node, Tree, line_ids, line_of
from opengyre.trajectory.turns import BrokenRecordError, ForkReason, Role, SampledSpan, TurnTokens
from tests.training_rows import tree_of_line
from tests.unit.trajectory_talks import made_talks, new_talks
from tests.unit.trajectory_worlds import Origin, Seen, ends_of, made_world, tree_of

MAIN, SUMMARY = Role.MAIN, Role.MAIN_SUMMARY
SUB, SUB_SUMMARY, SIDE = Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY, Role.SIDE


@cache
def made() -> list[list[Seen]]:
    return [made_world(seed).seen for seed in range(60)]


@cache
def talked() -> list[list[Seen]]:
    return [made_talks(seed).seen for seed in range(16, 24)]


def turn(
    number: int, *, parent: int = 0, kept: int = 0, reason: ForkReason = ForkReason.NONE
) -> TurnTokens:
    """Turn `number`: two new prompt ids, three sampled ones, all telling the turn."""
    return TurnTokens(
        turn=f"e1.t{number}",
        attempt=0,
        parent=f"e1.t{parent}" if parent else "",
        fork_reason=reason,
        role=MAIN,
        is_committed=True,
        num_kept_tokens=kept,
        new_prompt_ids=[100 * number + 1, 100 * number + 2],
        completion_ids=[100 * number + 11, 100 * number + 12, 100 * number + 13],
        logprobs=[-0.125, -0.25, -0.5],
        spans=(SampledSpan(start=0, end=3, version=number, engine="cell-1"),),
    )


def grown(*turns: TurnTokens) -> Tree:
    tree = Tree()
    for one in turns:
        tree.insert(one)
    return tree


def origins_of(node: Node) -> list[Origin]:
    """What the nodes on the way to `node` say of each token of its line."""
    origins: list[Origin] = []
    for piece in line_of(node):
        at = piece.node
        told = [Origin(token=(at.turn, at.attempt, k), role=at.role) for k in range(len(at.ids))]
        for span in at.spans:
            for k in range(span.start, span.end):
                told[at.num_injected + k] = replace(
                    told[at.num_injected + k],
                    engine=span.engine,
                    version=span.version,
                    logprob=float(at.logprobs[k]),
                )
        assert (piece.begin, len(origins)) == (at.begin, piece.begin)
        origins += told[: piece.end - piece.begin]
    return origins


def test_nodes_along_any_line_are_exactly_what_the_engine_saw_and_sampled() -> None:
    for seen in made() + talked():
        for one, node in zip(seen, tree_of(seen).nodes, strict=True):
            assert line_ids(node).tolist() == list(one.ids)
            assert (node.end, node.num_sampled) == (len(one.ids), len(one.sampled))


def test_every_token_of_a_line_tells_turn_attempt_role_engine_version_and_logprob() -> None:
    for seen in made() + talked():
        for one, node in zip(seen, tree_of(seen).nodes, strict=True):
            assert origins_of(node) == list(one.origins)


def test_each_token_is_stored_once_in_the_attempt_that_was_first_to_have_it() -> None:
    for seen in made() + talked():
        tree = tree_of(seen)
        for one, node in zip(seen, tree.nodes, strict=True):
            assert len(node.ids) == len(one.own)
        assert tree.num_tokens == sum(len(one.own) for one in seen)
        assert tree.num_sampled == sum(len(one.sampled) for one in seen)
        assert [node.index for node in tree.nodes] == list(range(len(seen)))


def test_only_what_a_standing_committed_attempt_of_the_last_launch_sampled_can_be_trained() -> None:
    for seen in made() + talked():
        tree, ends = tree_of(seen), ends_of(seen, trained_roles=list(Role))
        for one, node in zip(seen, tree.nodes, strict=True):
            told = {tree.reason_of(node)} if one.sampled else set()
            assert {ends[origin.token] for origin in one.sampled} - {Reason.NO_CONTEXT} <= told


def test_the_worlds_hold_what_they_should() -> None:
    assert {node.fork for seen in made() for node in tree_of(seen).nodes} == set(Fork)
    words = {node.fork for seen in talked() for node in tree_of(seen).nodes}
    assert words >= set(Fork) - {Fork.RELAUNCHED, Fork.NO_BRIDGE}
    ends = {reason for seen in made() + talked() for reason in ends_of(seen).values()}
    assert ends == {
        None,
        Reason.NOT_COMMITTED,
        Reason.SUPERSEDED_ATTEMPT,
        Reason.RELAUNCHED,
        Reason.UNTRAINED_ROLE,
        Reason.NO_CONTEXT,
    }
    assert any(not one.record.completion_ids for seen in made() for one in seen)
    assert any(is_within_an_answer(one) for seen in made() for one in seen)
    assert any(one.record.parent_attempt == 0 for seen in made() for one in seen)
    for worlds in (made(), talked()):
        assert any(is_after_a_superseded_answer(seen) for seen in worlds)


def is_within_an_answer(one: Seen) -> bool:
    kept, above = one.record.num_kept_tokens, one.above
    inside = above.origins[kept - 1 : kept + 1] if above and kept else ()
    return len(inside) == 2 and all(origin.is_sampled for origin in inside)


def is_after_a_superseded_answer(seen: list[Seen]) -> bool:
    """A call goes on from an answer although its turn was answered once more before that call."""
    standing: dict[str, Seen] = {}
    for one in seen:
        above = one.above if one.record.num_kept_tokens else None
        if above and above.record.is_committed and standing[above.record.turn] is not above:
            return True
        if one.record.is_committed:
            standing[one.record.turn] = one
    return False


def test_a_call_that_goes_on_from_an_answer_that_was_asked_for_again_keeps_its_tokens() -> None:
    talks = new_talks(1)
    question, more = talks.user(), talks.user()
    first = talks.ask((question,), MAIN)
    answer = talks.end(first, "first answer<|im_end|>")
    talks.session.expect_retry(first.attempt)
    again = talks.ask((question,), MAIN)
    talks.end(again, "second, longer answer of it<|im_end|>")
    assert (again.attempt.turn, again.attempt.attempt) == ("e1.t1", 1)
    talks.end(talks.ask((question, answer, more), MAIN), "yes<|im_end|>")
    assert line_ids(tree_of(talks.seen).nodes[-1]).tolist() == list(talks.seen[-1].ids)


ROOT = turn(1)
NEXT = turn(2, parent=1, kept=5)
NEW = ForkReason.NEW_ROOT
CUT = replace(NEXT, is_committed=False)


def as_role(one: TurnTokens, role: Role) -> TurnTokens:
    return replace(one, role=role)


@pytest.mark.parametrize(
    ("turns", "forks"),
    [
        pytest.param([ROOT, NEXT], [Fork.CONTINUED], id="main goes on"),
        pytest.param(
            [ROOT, NEXT, turn(3, parent=1, kept=5)],
            [Fork.CONTINUED, Fork.PARALLEL],
            id="siblings that go on from one answer",
        ),
        pytest.param(
            [ROOT, turn(2, parent=1, kept=4, reason=ForkReason.REWRITTEN_TURN)],
            [Fork.REWRITE],
            id="a turn is rewritten",
        ),
        pytest.param(
            [ROOT, turn(2, parent=1, kept=3, reason=ForkReason.REWRITTEN_REASONING)],
            [Fork.REWRITTEN_REASONING],
            id="reasoning is rewritten",
        ),
        pytest.param(
            [ROOT, turn(2, parent=1, kept=5, reason=ForkReason.NO_BRIDGE)],
            [Fork.NO_BRIDGE],
            id="the format has no bridge",
        ),
        pytest.param(
            [ROOT, CUT, turn(3, parent=1, kept=5, reason=ForkReason.KEPT_PARTS)],
            [Fork.CONTINUED, Fork.KEPT_PARTS],
            id="whole parts of a cut answer",
        ),
        pytest.param(
            [ROOT, CUT, replace(NEXT, attempt=1)],
            [Fork.CONTINUED, Fork.RETRY],
            id="an abandoned attempt is tried again",
        ),
        pytest.param(
            [ROOT, NEXT, replace(NEXT, attempt=1)],
            [Fork.CONTINUED, Fork.RETRY],
            id="an answer that was told is asked for again",
        ),
        pytest.param(
            [ROOT, replace(turn(2), launch=2), replace(turn(3, parent=2, kept=5), launch=2)],
            [Fork.RELAUNCHED, Fork.CONTINUED],
            id="launched again",
        ),
        pytest.param(
            [ROOT, turn(2, parent=1, kept=1, reason=NEW), turn(3, reason=NEW)],
            [Fork.NEW_HISTORY, Fork.NEW_HISTORY],
            id="an unlabelled harness compacts and calls a sub-agent",
        ),
        pytest.param(
            [ROOT, as_role(NEXT, SUMMARY), turn(3, parent=1, kept=1, reason=NEW)],
            [Fork.SUMMARY, Fork.COMPACTION],
            id="a compaction whose first call keeps the system prompt",
        ),
        pytest.param(
            [
                ROOT,
                as_role(turn(2, reason=NEW), SUMMARY),
                turn(3, reason=NEW),
                turn(4, parent=3, kept=5),
            ],
            [Fork.SUMMARY, Fork.COMPACTION, Fork.CONTINUED],
            id="a summary that shares nothing",
        ),
        pytest.param(
            [
                ROOT,
                as_role(turn(2, reason=NEW), SUB),
                as_role(turn(3, parent=2, kept=5), SUB),
                turn(4, parent=1, kept=5),
            ],
            [Fork.SUB_AGENT, Fork.CONTINUED, Fork.CONTINUED],
            id="a sub-agent that shares no prefix",
        ),
        pytest.param(
            [
                ROOT,
                as_role(turn(2, parent=1, kept=2, reason=NEW), SUB),
                as_role(turn(3, parent=2, kept=2, reason=NEW), SUB),
            ],
            [Fork.SUB_AGENT, Fork.NEW_HISTORY],
            id="two sub-agents with one beginning, which nothing on the wire tells apart",
        ),
        pytest.param(
            [
                ROOT,
                as_role(turn(2, reason=NEW), SUB),
                as_role(turn(3, parent=2, kept=5), SUB_SUMMARY),
                as_role(turn(4, parent=2, kept=2, reason=NEW), SUB),
                turn(5, parent=1, kept=5),
            ],
            [Fork.SUB_AGENT, Fork.SUMMARY, Fork.COMPACTION, Fork.CONTINUED],
            id="a sub-agent compacts",
        ),
        pytest.param(
            [ROOT, as_role(turn(2, reason=NEW), SIDE), turn(3, parent=1, kept=5)],
            [Fork.SIDE, Fork.CONTINUED],
            id="a title is made up beside",
        ),
        pytest.param(
            [ROOT, as_role(NEXT, SIDE), turn(3, parent=1, kept=5)],
            [Fork.SIDE, Fork.CONTINUED],
            id="a side call that goes on from the same answer",
        ),
        pytest.param(
            [ROOT, as_role(NEXT, SUB), turn(3, parent=1, kept=5)],
            [Fork.SUB_AGENT, Fork.CONTINUED],
            id="a sub-agent that knows all its caller knows",
        ),
        pytest.param(
            [ROOT, CUT, turn(3, parent=1, kept=5)],
            [Fork.CONTINUED, Fork.CONTINUED],
            id="a dropped answer is not gone on beside",
        ),
    ],
)
def test_a_fork_says_what_happened(turns: list[TurnTokens], forks: list[Fork]) -> None:
    assert [node.fork for node in grown(*turns).nodes] == [Fork.ROOT, *forks]


def test_an_unlabelled_harness_is_all_main_and_its_forks_are_those_of_the_matcher() -> None:
    by_label = {Fork.SUB_AGENT, Fork.SUMMARY, Fork.COMPACTION, Fork.SIDE}
    worlds = [made_world(seed) for seed in range(0, 40, 4)]
    assert not any(world.is_labelled for world in worlds)
    for world in worlds:
        nodes = tree_of(world.seen).nodes
        assert {node.role for node in nodes} == {MAIN}
        assert not {node.fork for node in nodes} & by_label


def test_what_main_says_first_after_a_sub_agent_rewrites_nothing() -> None:
    scout, summed_up = as_role(ROOT, SUB), as_role(NEXT, SUB_SUMMARY)
    first = turn(3, parent=2, kept=1, reason=ForkReason.REWRITTEN_TURN)
    forks = [node.fork for node in grown(scout, summed_up, first).nodes]
    assert forks[1] is Fork.SUMMARY
    assert forks[2] in (Fork.ROOT, Fork.NEW_HISTORY)


def test_a_relaunch_is_told_also_when_the_launch_is_known_before_its_first_call() -> None:
    tree = grown(ROOT, NEXT)
    tree.launch = 2
    later = [replace(turn(3), launch=2), replace(turn(4, parent=3, kept=5), launch=2)]
    assert [tree.insert(one).fork for one in later] == [Fork.RELAUNCHED, Fork.CONTINUED]
    assert tree.reason_of(tree.nodes[0]) is Reason.RELAUNCHED
    assert tree.reason_of(tree.nodes[2]) is None


def test_nothing_of_a_launch_is_trained_once_another_began_without_a_call() -> None:
    tree = grown(ROOT)
    tree.launch = 2
    assert tree.reason_of(tree.nodes[0]) is Reason.RELAUNCHED


@pytest.mark.parametrize(
    ("told", "reasons"),
    [
        ([False], [Reason.NOT_COMMITTED]),
        ([False, True], [Reason.NOT_COMMITTED, None]),
        ([True, True], [Reason.SUPERSEDED_ATTEMPT, None]),
        ([True, False], [None, Reason.NOT_COMMITTED]),
        ([True, False, True], [Reason.SUPERSEDED_ATTEMPT, Reason.NOT_COMMITTED, None]),
        ([False, False], [Reason.NOT_COMMITTED, Reason.NOT_COMMITTED]),
    ],
)
def test_the_last_committed_attempt_stands(told: list[bool], reasons: list[Reason | None]) -> None:
    turns = [replace(ROOT, attempt=k, is_committed=is_told) for k, is_told in enumerate(told)]
    tree = grown(*turns)
    assert [tree.reason_of(node) for node in tree.nodes] == reasons


def test_a_turn_that_follows_a_retried_one_goes_on_from_the_attempt_that_stands() -> None:
    again = replace(ROOT, attempt=1, completion_ids=[7, 8], logprobs=[-1, -1], spans=())
    again = replace(again, spans=(SampledSpan(start=0, end=2, version=1, engine="cell-1"),))
    tree = grown(replace(ROOT, is_committed=False), again, turn(2, parent=1, kept=4))
    assert tree.nodes[2].parent is tree.nodes[1]
    assert line_ids(tree.nodes[2]).tolist() == [101, 102, 7, 8, 201, 202, 211, 212, 213]


def test_an_attempt_that_is_told_late_does_not_move_what_went_on_before_it() -> None:
    tree = grown(ROOT, NEXT, replace(ROOT, attempt=1, completion_ids=[7, 8, 9]))
    assert line_ids(tree.nodes[1]).tolist()[:5] == [101, 102, 111, 112, 113]
    assert tree.reason_of(tree.nodes[0]) is Reason.SUPERSEDED_ATTEMPT


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (replace(NEXT, num_kept_tokens=6), r"e1\.t2 keeps .*tokens of e1\.t1"),
        (replace(NEXT, parent="e1.t9"), r"e1\.t2 keeps .*tokens of e1\.t9"),
        (replace(NEXT, num_kept_tokens=-1), r"e1\.t2"),
        (replace(NEXT, parent=""), r"e1\.t2"),
        (replace(NEXT, launch=2), r"e1\.t2"),
        (replace(NEXT, logprobs=[-1.0]), r"e1\.t2 has 3 ids"),
        (replace(NEXT, spans=()), r"e1\.t2 has 3 ids"),
        (replace(NEXT, completion_ids=[1, 2]), r"e1\.t2 has 2 ids"),
        (replace(NEXT, spans=(replace(NEXT.spans[0], start=1),)), r"e1\.t2: span starts at 1"),
        (replace(NEXT, spans=NEXT.spans * 2), r"e1\.t2: span starts at 0"),
    ],
)
def test_a_record_that_contradicts_the_others_is_named_and_changes_nothing(
    broken: TurnTokens, words: str
) -> None:
    tree = grown(ROOT)
    with pytest.raises(BrokenRecordError, match=words):
        tree.insert(broken)
    assert (len(tree.nodes), tree.launch, tree.num_tokens) == (1, 1, 5)
    assert tree.insert(NEXT).fork is Fork.CONTINUED


def num_lines_run(tree: Tree, record: TurnTokens) -> int:
    """How many lines of Python an insertion takes: work counted, not timed."""
    num_lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        tree.insert(record)
    finally:
        sys.settrace(before)
    return num_lines


def long_turn(num_tokens: int) -> TurnTokens:
    return replace(
        ROOT,
        new_prompt_ids=range(num_tokens // 2),
        completion_ids=range(num_tokens // 2),
        logprobs=[-1.0] * (num_tokens // 2),
        spans=(SampledSpan(start=0, end=num_tokens // 2, version=1, engine="cell-1"),),
    )


def test_an_insertion_costs_what_is_new_in_it_however_long_the_execution_is() -> None:
    tree = grown(long_turn(500_000))
    tracemalloc.start()
    try:
        for number, kept in enumerate([500_000, 499_999, 250_001], start=2):
            reason = ForkReason.NONE if number == 2 else ForkReason.REWRITTEN_TURN
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            tree.insert(turn(number, parent=1, kept=kept, reason=reason))
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 20_000
    finally:
        tracemalloc.stop()


def test_an_insertion_takes_as_many_steps_at_turn_2000_as_at_turn_10() -> None:
    tree = grown(ROOT)
    steps: dict[int, int] = {}
    for number in range(2, 2001):
        record = turn(number, parent=number - 1, kept=5 * (number - 1))
        if number in (10, 2000):
            steps[number] = num_lines_run(tree, record)
        else:
            tree.insert(record)
    assert steps[2000] <= steps[10]
    fork = turn(2001, parent=2000, kept=9_998, reason=ForkReason.REWRITTEN_TURN)
    assert num_lines_run(tree, fork) <= 2 * steps[10]


def test_a_long_execution_takes_at_most_sixteen_bytes_a_token() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = grown(long_turn(200_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.num_tokens == 200_000
    assert after - before <= 16 * 200_000


def test_an_attempt_that_is_told_twice_is_named() -> None:
    tree = tree_of_line([1, 2], [0, 1])
    node = tree.nodes[0]
    again = TurnTokens(
        turn=node.turn,
        attempt=node.attempt,
        parent="",
        fork_reason=ForkReason.NONE,
        role=Role.MAIN,
        is_committed=True,
        num_kept_tokens=0,
        new_prompt_ids=[1],
        completion_ids=[2],
        logprobs=[-0.5],
        spans=node.spans,
    )
    with pytest.raises(BrokenRecordError, match=r"e1\.t1 attempt 0 is told twice"):
        tree.insert(again)
    assert len(tree.nodes) == 1
