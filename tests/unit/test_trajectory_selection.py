"""Which paths are drawn, which of their tokens are trained, and what became of all others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from opengyre.trajectory.account import DROPPING, Reason, TokenAccount
from opengyre.trajectory.selection import Path, Selection, SelectionSettings, select
from opengyre.trajectory.tree import Tree, line_ids
from opengyre.trajectory.turns import TRAINED_ROLES, ForkReason, Role, SampledSpan, TurnTokens
from tests.unit.trajectory_talks import made_talks
from tests.unit.trajectory_worlds import (
    Seen,
    Token,
    ends_of,
    leaves_of,
    made_world,
    seen_of,
    tree_of,
)

MAIN, SUMMARY = Role.MAIN, Role.MAIN_SUMMARY
SUB, SUB_SUMMARY = Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY
ORDERS: list[Sequence[Role]] = [TRAINED_ROLES, (SUB, MAIN), (MAIN,), TRAINED_ROLES[::-1]]


def drawn(tree: Tree, settings: SelectionSettings, seed: int = 0) -> Selection:
    return select(tree, settings=settings, rng=np.random.default_rng(seed))


@cache
def worlds() -> list[list[Seen]]:
    made = [made_world(seed).seen for seed in range(60)]
    return made + [made_talks(seed).seen for seed in range(16, 21)]


@cache
def cases() -> list[tuple[Sequence[Seen], SelectionSettings, Selection]]:
    found: list[tuple[Sequence[Seen], SelectionSettings, Selection]] = []
    for k, (seen, max_paths) in enumerate(product(worlds(), (0, 1, 3, 5))):
        roles = ORDERS[k // 4 % len(ORDERS)]
        settings = SelectionSettings(max_paths=max_paths, trained_roles=roles)
        found.append((seen, settings, drawn(tree_of(seen), settings)))
    return found


def tokens_of(path: Path, seen: Sequence[Seen]) -> list[Token]:
    """What `path` trains, by the truth of its leaf's line."""
    origins = seen[path.leaf.index].origins
    return [origins[at].token for begin, end in path.trained for at in range(begin, end)]


@dataclass(slots=True, kw_only=True)
class Untrained:
    """The rule, once more and plainly, over whole lists."""

    seen: Sequence[Seen]
    roles: Sequence[Role]
    taken: set[Token] = field(default_factory=set)
    ends: Mapping[Token, Reason | None] = field(init=False)
    leaves: list[Seen] = field(init=False)

    def __post_init__(self) -> None:
        ends = ends_of(self.seen, self.roles)
        self.ends, self.leaves = ends, leaves_of(self.seen, ends)

    def of(self, leaf: Seen) -> list[Token]:
        """In the order of its line."""
        names = [origin.token for origin in leaf.origins if origin.is_sampled]
        return [name for name in names if self.ends[name] is None and name not in self.taken]

    def chances(self) -> dict[str, int]:
        """Untrained tokens of each leaf that may be drawn now, by its turn."""
        for role in self.roles:
            open_of = {
                leaf.record.turn: len(self.of(leaf))
                for leaf in self.leaves
                if leaf.record.role is role and self.of(leaf)
            }
            if open_of:
                return open_of
        return {}

    def account(self) -> TokenAccount:
        lost = Counter(
            reason or Reason.NOT_SELECTED
            for name, reason in self.ends.items()
            if name not in self.taken
        )
        return TokenAccount(
            sampled=len(self.ends),
            trained=len(self.taken),
            masked={str(reason): num for reason, num in lost.items() if reason not in DROPPING},
            dropped={str(reason): num for reason, num in lost.items() if reason in DROPPING},
        )


def test_each_draw_takes_all_untrained_tokens_of_a_leaf_of_the_highest_class_that_has_any() -> None:
    for seen, settings, selection in cases():
        left = Untrained(seen=seen, roles=settings.trained_roles)
        for path in selection.paths:
            leaf = seen[path.leaf.index]
            assert leaf in left.leaves
            assert leaf.record.turn in left.chances()
            assert tokens_of(path, seen) == left.of(leaf)
            left.taken.update(tokens_of(path, seen))
        if not settings.max_paths or len(selection.paths) < settings.max_paths:
            assert left.chances() == {}


def test_no_more_paths_are_drawn_than_the_bound_allows_and_classes_fall() -> None:
    is_bounded = 0
    for _, settings, selection in cases():
        roles = list(settings.trained_roles)
        places = [roles.index(path.leaf.role) for path in selection.paths]
        assert places == sorted(places)
        assert not settings.max_paths or len(places) <= settings.max_paths
        is_bounded += 1 < len(places) == settings.max_paths
    assert is_bounded > 20


def test_every_sampled_token_is_trained_once_or_masked_or_dropped_for_its_own_reason() -> None:
    for seen, settings, selection in cases():
        trained = [name for path in selection.paths for name in tokens_of(path, seen)]
        assert len(trained) == len(set(trained)) == selection.account.trained
        assert selection.account.is_balanced
        expected = Untrained(seen=seen, roles=settings.trained_roles, taken=set(trained))
        assert selection.account == expected.account()


def test_without_a_bound_every_token_that_can_be_trained_is() -> None:
    for seen, settings, selection in cases():
        if not settings.max_paths:
            account = selection.account
            assert Reason.NOT_SELECTED not in account.masked
            ends = ends_of(seen, settings.trained_roles)
            assert account.trained == list(ends.values()).count(None)


def test_a_path_is_the_whole_line_of_its_leaf_and_trains_sampled_tokens_in_order() -> None:
    for seen, _, selection in cases():
        for path in selection.paths:
            ids = [piece.node.ids[: piece.end - piece.begin] for piece in path.pieces]
            assert np.concatenate(ids).tolist() == line_ids(path.leaf).tolist()
            assert path.num_tokens == path.leaf.end
            edges = [edge for one in path.trained for edge in one]
            assert edges == sorted(edges)
            assert all(begin < end for begin, end in path.trained)
            assert path.num_trained_tokens == len(tokens_of(path, seen)) > 0


def test_the_same_generator_state_draws_the_same_and_another_one_draws_another() -> None:
    settings = SelectionSettings(max_paths=2)
    num_other = 0
    for seen in worlds()[:40]:
        first, again, other = (drawn(tree_of(seen), settings, seed) for seed in (7, 7, 8))
        assert [path.leaf.index for path in first.paths] == [p.leaf.index for p in again.paths]
        assert [path.trained for path in first.paths] == [path.trained for path in again.paths]
        assert first.account == again.account
        num_other += [p.leaf.index for p in first.paths] != [p.leaf.index for p in other.paths]
    assert num_other > 5


def turn(number: int, num_sampled: int, *, parent: int = 0, kept: int = 0) -> TurnTokens:
    """Turn `number`: two new prompt ids, `num_sampled` sampled ones; a fork unless a root."""
    return TurnTokens(
        turn=f"e1.t{number}",
        attempt=0,
        parent=f"e1.t{parent}" if parent else "",
        fork_reason=ForkReason.NONE if not parent else ForkReason.REWRITTEN_TURN,
        role=MAIN,
        is_committed=True,
        num_kept_tokens=kept,
        new_prompt_ids=[100 * number + 1, 100 * number + 2],
        completion_ids=[100 * number + 11 + k for k in range(num_sampled)],
        logprobs=[-0.5] * num_sampled,
        spans=(SampledSpan(start=0, end=num_sampled, version=1, engine="cell-1"),),
    )


def grown(*turns: TurnTokens) -> Tree:
    tree = Tree()
    for one in turns:
        tree.insert(one)
    return tree


UNCAPPED = SelectionSettings(max_paths=0)
ROOT = turn(1, 3)
NEXT = turn(2, 3, parent=1, kept=5)


def ways(tree: Tree, settings: SelectionSettings = UNCAPPED) -> dict[str, list[tuple[int, int]]]:
    """What each leaf's path trains."""
    return {path.leaf.turn: list(path.trained) for path in drawn(tree, settings).paths}


def test_turns_that_extend_each_other_are_one_path_that_trains_their_sampled_tokens() -> None:
    assert ways(grown(ROOT, NEXT)) == {"e1.t2": [(2, 5), (7, 10)]}


def test_what_a_fork_keeps_of_a_sampled_span_is_trained_by_one_of_the_two_paths() -> None:
    tree = grown(ROOT, NEXT, turn(3, 3, parent=1, kept=4))
    first, second = drawn(tree, UNCAPPED).paths
    shared = {"e1.t2": [(7, 10)], "e1.t3": [(6, 9)]}
    assert second.trained[-1] == shared[second.leaf.turn][0]
    assert first.trained[0] == ((2, 5) if first.leaf.turn == "e1.t2" else (2, 4))
    assert second.num_trained_tokens == (3 if first.leaf.turn == "e1.t2" else 4)
    assert drawn(tree, UNCAPPED).account == TokenAccount(sampled=9, trained=9)


def test_an_answer_that_no_line_goes_on_from_whole_is_a_leaf_of_its_own() -> None:
    assert set(ways(grown(ROOT, turn(2, 3, parent=1, kept=4)))) == {"e1.t1", "e1.t2"}
    assert set(ways(grown(ROOT, turn(2, 3, parent=1, kept=5)))) == {"e1.t2"}


def test_an_answer_without_tokens_is_no_leaf() -> None:
    assert ways(grown(ROOT, turn(2, 0, parent=1, kept=5))) == {"e1.t1": [(2, 5)]}


@pytest.mark.parametrize("between", [replace(NEXT, role=Role.SIDE), turn(2, 0, parent=1, kept=5)])
def test_an_answer_that_is_kept_whole_past_a_call_of_which_nothing_is_kept_is_no_leaf(
    between: TurnTokens,
) -> None:
    tree = grown(ROOT, between, turn(3, 3, parent=2, kept=5))
    for seed in range(20):
        (path,) = drawn(tree, UNCAPPED, seed).paths
        assert (path.leaf.turn, path.trained) == ("e1.t3", ((2, 5), (7, 10)))


def test_an_untrained_call_between_two_trained_ones_is_context() -> None:
    side = replace(NEXT, role=Role.SIDE)
    tree = grown(ROOT, side, turn(3, 3, parent=2, kept=10))
    assert ways(tree) == {"e1.t3": [(2, 5), (12, 15)]}
    assert drawn(tree, UNCAPPED).account == TokenAccount(
        sampled=9, trained=6, masked={"untrained_role": 3}
    )


def test_an_answer_that_was_superseded_is_context_where_a_line_had_gone_on_from_it() -> None:
    tree = grown(ROOT, NEXT, replace(ROOT, attempt=1))
    assert ways(tree) == {"e1.t2": [(7, 10)], "e1.t1": [(2, 5)]}
    assert drawn(tree, UNCAPPED).account == TokenAccount(
        sampled=9, trained=6, dropped={"superseded_attempt": 3}
    )


CUT = replace(NEXT, is_committed=False)
CUT_ROOT = replace(ROOT, is_committed=False)


@pytest.mark.parametrize(
    ("turns", "roles", "account"),
    [
        ([ROOT, CUT, turn(3, 3, parent=1, kept=5)], TRAINED_ROLES, {"not_committed": 3}),
        ([CUT_ROOT], TRAINED_ROLES, {"not_committed": 3}),
        ([CUT_ROOT, replace(ROOT, attempt=1)], TRAINED_ROLES, {"not_committed": 3}),
        ([ROOT, replace(turn(2, 4), launch=2)], TRAINED_ROLES, {"relaunched": 3}),
        ([CUT_ROOT, replace(turn(2, 4), launch=2)], TRAINED_ROLES, {"relaunched": 3}),
        ([replace(ROOT, role=Role.SIDE)], TRAINED_ROLES, {"untrained_role": 3}),
        ([replace(ROOT, role=SUMMARY)], (MAIN, SUB), {"untrained_role": 3}),
        ([ROOT, NEXT], (), {"untrained_role": 6}),
        ([replace(ROOT, new_prompt_ids=[])], TRAINED_ROLES, {"no_context": 1}),
        ([replace(ROOT, new_prompt_ids=[], role=Role.SIDE)], TRAINED_ROLES, {"untrained_role": 3}),
        ([replace(turn(1, 1), new_prompt_ids=[])], TRAINED_ROLES, {"no_context": 1}),
    ],
)
def test_a_token_that_is_not_trained_has_its_reason(
    turns: list[TurnTokens], roles: Sequence[Role], account: dict[str, int]
) -> None:
    tree = grown(*turns)
    got = drawn(tree, SelectionSettings(max_paths=0, trained_roles=roles)).account
    assert {**got.masked, **got.dropped} == account
    assert (got.sampled, got.is_balanced) == (tree.num_sampled, True)
    assert set(got.dropped) <= set(DROPPING)
    assert not set(got.masked) & set(DROPPING)


def test_an_execution_without_calls_has_no_paths() -> None:
    assert drawn(Tree(), UNCAPPED) == Selection(paths=(), account=TokenAccount())


def test_an_execution_of_thousands_of_turns_is_one_path() -> None:
    chain = [turn(k, 3, parent=k - 1, kept=5 * (k - 1)) for k in range(1, 3001)]
    (path,) = drawn(grown(*chain), SelectionSettings()).paths
    assert (path.num_tokens, path.num_trained_tokens) == (15_000, 9_000)


def compacted() -> list[Seen]:
    """Main, its summary, main again; a sub-agent beside them; forks of each in its answers."""
    made = [
        turn(1, 6),
        replace(turn(2, 4, parent=1, kept=8), role=SUMMARY),
        turn(3, 9),
        turn(4, 2, parent=3, kept=6),
        turn(5, 5, parent=3, kept=9),
        replace(turn(6, 7), role=SUB),
        replace(turn(7, 3, parent=6, kept=4), role=SUB_SUMMARY),
    ]
    seen: dict[str, Seen] = {}
    for record in made:
        seen[record.turn] = seen_of(record, seen.get(record.parent))
    return list(seen.values())


NUM_DRAWS = 2000
CRITICAL = 20.5
"""Chi-square of five degrees of freedom exceeds it once in a thousand."""


def chi_square(
    counts: Mapping[tuple[str, ...], int], law: Mapping[tuple[str, ...], float]
) -> float:
    assert set(counts) <= set(law)
    assert sum(law.values()) == pytest.approx(1)
    total = sum(counts.values())
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in law.items())


def law_of(weights: Mapping[tuple[str, ...], Mapping[str, float]]) -> dict[tuple[str, ...], float]:
    """Of the first two leaves; `weights` of a next leaf after those that were drawn."""
    law: dict[tuple[str, ...], float] = {}
    first = weights[()]
    for one, weight in first.items():
        second = {key: value for key, value in weights[(one,)].items() if key != one}
        for other, after in second.items():
            p = weight / sum(first.values()) * after / sum(second.values())
            law[(one, other)] = p
    return law


T3, T4, T5 = "e1.t3", "e1.t4", "e1.t5"
RIGHT = {
    (): {T3: 9, T4: 6, T5: 12},
    (T3,): {T4: 2, T5: 5},
    (T4,): {T3: 5, T5: 8},
    (T5,): {T3: 2, T4: 2},
}
WRONG = {
    "all leaves alike": {key: {T3: 1, T4: 1, T5: 1} for key in RIGHT},
    "tokens that are trained already count": dict.fromkeys(RIGHT, RIGHT[()]),
    "only the leaf's own tokens count": {key: {T3: 9, T4: 2, T5: 5} for key in RIGHT},
    "prompts count": {**RIGHT, (): {T3: 11, T4: 10, T5: 16}},
}


def test_a_leaf_is_drawn_with_a_chance_of_its_share_of_the_untrained_tokens() -> None:
    tree = tree_of(compacted())
    settings = SelectionSettings(max_paths=2)
    counts: Counter[tuple[str, ...]] = Counter()
    for seed in range(NUM_DRAWS):
        counts[tuple(path.leaf.turn for path in drawn(tree, settings, seed).paths)] += 1
    assert chi_square(counts, law_of(RIGHT)) < CRITICAL
    for weights in WRONG.values():
        assert chi_square(counts, law_of(weights)) > CRITICAL


def test_lower_classes_are_drawn_from_when_the_higher_ones_are_used_up() -> None:
    tree = tree_of(compacted())
    for seed, max_paths in product(range(20), range(7)):
        settings = SelectionSettings(max_paths=max_paths)
        turns = [path.leaf.turn for path in drawn(tree, settings, seed).paths]
        num = max_paths or 6
        assert len(turns) == num
        assert set(turns[:3]) <= {T3, T4, T5}
        assert turns[3:] == ["e1.t2", "e1.t6", "e1.t7"][: num - 3 if num > 3 else 0]


def test_the_order_of_the_trained_roles_is_that_of_their_classes() -> None:
    tree = tree_of(compacted())
    settings = SelectionSettings(max_paths=3, trained_roles=(SUB_SUMMARY, SUMMARY, MAIN))
    for seed in range(5):
        selection = drawn(tree, settings, seed)
        assert [path.leaf.turn for path in selection.paths][:2] == ["e1.t7", "e1.t2"]
        first = selection.paths[0]
        assert first.trained == ((6, 9),)
        assert selection.account.masked["untrained_role"] == 7
