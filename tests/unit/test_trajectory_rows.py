from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.groups import Member, rows_of_group
from opengyre.trajectory.rows import BrokenRecordError, TokenAccount, TurnTokens, paths_of


def _turn(number: int, *, parent: TurnTokens | None = None, kept: int = 0) -> TurnTokens:
    """Turn `number`: two new prompt ids and three sampled ids, all telling the turn."""
    return TurnTokens(
        turn=f"e1.t{number}",
        attempt=0,
        parent=parent.turn if parent else "",
        fork_reason="",
        role="main",
        is_committed=True,
        num_kept_tokens=kept,
        new_prompt_ids=[100 * number + 1, 100 * number + 2],
        completion_ids=[100 * number + 11, 100 * number + 12, 100 * number + 13],
        logprobs=[-0.1, -0.2, -0.3],
        versions=[number] * 3,
    )


def test_turns_that_extend_each_other_are_one_path_with_only_sampled_tokens_trained() -> None:
    first = _turn(1)
    second = _turn(2, parent=first, kept=5)
    paths, account = paths_of([first, second])
    (path,) = paths
    assert path.token_ids == [101, 102, 111, 112, 113, 201, 202, 211, 212, 213]
    assert path.mask == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert path.logprobs == [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2, -0.3]
    assert path.versions == [0, 0, 1, 1, 1, 0, 0, 2, 2, 2]
    assert path.turns == ("e1.t1", "e1.t2")
    assert account == TokenAccount(sampled=6, trained=6)


def test_a_fork_starts_a_path_in_which_the_kept_tokens_are_context() -> None:
    first = _turn(1)
    second = _turn(2, parent=first, kept=5)
    fork = replace(_turn(3, parent=second, kept=4), fork_reason="history rewritten")
    paths, account = paths_of([first, second, fork])
    assert [path.turns for path in paths] == [("e1.t1", "e1.t2"), ("e1.t3",)]
    assert paths[1].token_ids == [101, 102, 111, 112, 301, 302, 311, 312, 313]
    assert paths[1].mask == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert account == TokenAccount(sampled=9, trained=9)


def test_the_second_turn_that_extends_the_same_parent_trains_the_parent_only_once() -> None:
    first = _turn(1)
    children = [_turn(number, parent=first, kept=5) for number in (2, 3)]
    paths, account = paths_of([first, *children])
    assert [sum(path.mask) for path in paths] == [6, 3]
    assert account.trained == 9


def test_a_turn_whose_end_was_never_told_is_dropped_and_the_next_goes_on_from_its_parent() -> None:
    first = _turn(1)
    cut = replace(_turn(2, parent=first, kept=5), is_committed=False)
    third = _turn(3, parent=first, kept=5)
    paths, account = paths_of([first, cut, third])
    assert [path.turns for path in paths] == [("e1.t1", "e1.t3")]
    assert account == TokenAccount(sampled=9, trained=6, dropped={"not_committed": 3})


def test_of_several_attempts_the_committed_one_stands_for_the_turn() -> None:
    cut = replace(_turn(1), is_committed=False)
    told = replace(_turn(1), attempt=1)
    paths, account = paths_of([cut, told])
    assert [path.turns for path in paths] == [("e1.t1",)]
    assert account == TokenAccount(sampled=6, trained=3, dropped={"not_committed": 3})


def test_a_turn_of_an_untrained_role_is_masked() -> None:
    for role, untrained_roles in [("side", ("side",)), ("main-summary", ("main-summary",))]:
        turn = replace(_turn(1), role=role)
        paths, account = paths_of([turn], untrained_roles=untrained_roles)
        assert paths == []
        assert account == TokenAccount(sampled=3, masked={"untrained_role": 3})
        assert paths_of([turn], untrained_roles=())[1].trained == 3


def test_the_first_token_of_an_empty_prompt_cannot_be_trained() -> None:
    paths, account = paths_of([replace(_turn(1), new_prompt_ids=[])])
    assert paths[0].mask == [0, 1, 1]
    assert account == TokenAccount(sampled=3, trained=2, masked={"no_context": 1})


def test_a_turn_that_keeps_more_than_its_parent_has_is_named() -> None:
    first = _turn(1)
    with pytest.raises(BrokenRecordError, match=r"e1\.t2 keeps tokens of e1\.t1"):
        paths_of([first, _turn(2, parent=first, kept=6)])


def test_arrays_of_different_lengths_are_named() -> None:
    with pytest.raises(BrokenRecordError, match=r"e1\.t1 has ids"):
        paths_of([replace(_turn(1), versions=[1])])


def test_rows_of_a_group_carry_the_execution_total_over_its_paths() -> None:
    first = _turn(1)
    fork = replace(_turn(2, parent=first, kept=1), fork_reason="rewritten")
    paths, account = paths_of([first, fork])
    members = [
        Member(execution="e1", reward=1.0, paths=paths, account=account),
        Member(execution="e2", reward=0.0, paths=paths, account=account),
        Member(execution="e3", reward=None, paths=paths, account=account),
    ]
    got = rows_of_group("g1", members, baseline=Baseline.MEAN)
    assert [(row.execution, row.advantage) for row in got.rows] == [
        ("e1", 0.5),
        ("e1", 0.5),
        ("e2", -0.5),
        ("e2", -0.5),
    ]
    assert {(row.num_path_tokens, row.num_execution_tokens) for row in got.rows} == {(3, 6)}
    assert got.account == TokenAccount(sampled=18, trained=12, dropped={"no_verdict": 6})


def test_a_group_without_variance_is_counted_but_masked() -> None:
    paths, account = paths_of([_turn(1)])
    members = [
        Member(execution=name, reward=0.5, paths=paths, account=account) for name in ("e1", "e2")
    ]
    got = rows_of_group("g1", members, baseline=Baseline.MEAN_STD)
    assert [row.is_counted_only for row in got.rows] == [True, True]
    assert got.account == TokenAccount(sampled=6, masked={"no_variance": 6})


def _drawn(data: st.DataObject, turn: TurnTokens, attempt: int) -> TurnTokens:
    return replace(
        turn,
        attempt=attempt,
        is_committed=data.draw(st.booleans()),
        role=data.draw(st.sampled_from(["main", "side"])),
        fork_reason=data.draw(st.sampled_from(["", "rewritten"])),
    )


@given(data=st.data())
def test_every_sampled_token_is_trained_once_or_masked_or_dropped(data: st.DataObject) -> None:
    turns: list[TurnTokens] = []
    for number in range(1, data.draw(st.integers(1, 8)) + 1):
        known = [turn for turn in turns if turn.turn != f"e1.t{number}"]
        parent = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else None
        turn = _turn(number, parent=parent, kept=data.draw(st.integers(0, 5)) if parent else 0)
        num_attempts = data.draw(st.integers(1, 2))
        turns += [_drawn(data, turn, attempt) for attempt in range(num_attempts)]
    paths, account = paths_of(turns)
    assert account.is_balanced
    assert account.sampled == 3 * len(turns)
    trained = [
        token_id
        for path in paths
        for token_id, is_trained in zip(path.token_ids, path.mask, strict=True)
        if is_trained
    ]
    assert len(trained) == len(set(trained)) == account.trained
