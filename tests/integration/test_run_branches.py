"""Runs of the bundled agent's variants: their histories branch, under the right roles."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from run_rig import Driven, drive, make_trails

from opengyre.control import facts as f
from opengyre.seams.records import TurnRecord
from opengyre.store.observations import TurnRecorded

pytestmark = pytest.mark.timeout(120)

PERFECT_SHORT_RUN = ("run.num_steps=2", "engine.scripted.mistakes=0", "sampling.context_tokens=400")


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


def turns_by_execution(driven: Driven) -> list[list[TurnRecord]]:
    found: dict[str, list[TurnRecord]] = defaultdict(list)
    for told in driven.all(TurnRecorded):
        found[told.turn.execution].append(told.turn)
    return [sorted(turns, key=lambda turn: turn.received_s) for turns in found.values()]


def num_prompt_tokens(turn: TurnRecord) -> int:
    return turn.num_kept_tokens + turn.num_new_prompt_tokens


def assert_all_is_solved(driven: Driven) -> None:
    assert driven.end.exit_code == 0
    assert set(driven.outcomes().values()) == {f.Outcome.COMPLETED}
    assert {fact.reward for fact in driven.all(f.VerdictGiven)} == {1.0}


def assert_extends(turn: TurnRecord, before: TurnRecord) -> None:
    assert (turn.parent, turn.fork_reason) == (before.turn, "")


def test_an_agent_that_compacts_branches_at_each_summary(tmp_path: Path, trails: Path) -> None:
    driven = drive(tmp_path, trails, *PERFECT_SHORT_RUN, 'harness.profile="gyre-agent-compact"')
    assert_all_is_solved(driven)
    num_summaries = 0
    for turns in turns_by_execution(driven):
        assert turns[0].role == turns[-1].role == "main"
        for before, turn in pairwise(turns):
            if before.role == "main":
                assert_extends(turn, before)
                num_summaries += turn.role == "main-summary"
            else:
                assert turn.role == "main"
                assert turn.fork_reason
                assert num_prompt_tokens(turn) < before.num_kept_tokens
    assert num_summaries > 5


def test_a_sub_agent_is_a_root_of_its_own_with_a_summary(tmp_path: Path, trails: Path) -> None:
    driven = drive(tmp_path, trails, *PERFECT_SHORT_RUN, 'harness.profile="gyre-agent-sub-agent"')
    assert_all_is_solved(driven)
    roles = set()
    for turns in turns_by_execution(driven):
        begin = next(at for at, turn in enumerate(turns) if turn.role == "main")
        scout, main = turns[:begin], turns[begin:]
        assert {turn.role for turn in main} == {"main"}
        assert [turn.role for turn in scout] == ["sub-agent"] * 4 + ["sub-agent-summary"]
        assert main[0].fork_reason
        assert num_prompt_tokens(main[0]) < num_prompt_tokens(scout[-1])
        for line in (scout, main):
            for before, turn in pairwise(line):
                assert_extends(turn, before)
        roles |= {turn.role for turn in turns}
    assert roles == {"main", "sub-agent", "sub-agent-summary"}
