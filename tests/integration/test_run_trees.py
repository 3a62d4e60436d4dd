"""A whole run whose agent compacts and has a sub-agent: its trees and its accounts agree."""

import re
from collections import Counter

import pytest
from run_rig import Driven, drive, make_trails
from typer.testing import CliRunner

from opengyre.cli.run import run_app
from opengyre.config.base import PROFILES
from opengyre.store.observations import StepReport
from opengyre.store.run_folder import open_run_folder
from opengyre.trajectory.account import TokenAccount
from opengyre.views.trees import ExecutionTree, open_trees
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(120)

BRANCHING = (
    "run.num_steps=3",
    "sampling.context_tokens=400",
    "training.max_paths=2",
    "engine.scripted.mistakes=0.3",
)


def both_branches() -> str:
    """The profile that compacts, with the options and labels of the one that has a sub-agent."""
    compacts = (PROFILES / "gyre-agent-compact.toml").read_text()
    _, mark, labels = (PROFILES / "gyre-agent-sub-agent.toml").read_text().partition("[[labels]]")
    argv, end, rest = compacts.partition("\n]\n")
    return f'{argv}\n    "--scout-turns", "6",{end}{rest}\n{mark}{labels}'


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("branched")
    profile = folder / "both.toml"
    profile.write_text(both_branches())
    trails = make_trails(folder / "trails", 8)
    return drive(folder, trails, *BRANCHING, f'harness.profile="{profile}"')


@pytest.fixture(scope="module")
def trees(branched: Driven) -> list[ExecutionTree]:
    run = open_trees(branched.rows)
    return [run.of(name) for name in run.state.executions]


def test_every_promise_is_kept_and_tokens_end_trained_or_not_selected(branched: Driven) -> None:
    assert branched.end.exit_code == 0
    results = {one.promise: one for one in verify_run(open_run_folder(branched.end.folder))}
    assert [one.problems for one in results.values() if one.problems] == []
    assert results["P11"].num_checked == results["P12"].num_checked == 3 * 4 * 4
    (masked,) = [line for line in results["P11"].notes if line.startswith("masked: ")]
    assert "not_selected" in masked


def test_the_ends_of_the_attempts_of_each_execution_are_its_account(
    trees: list[ExecutionTree],
) -> None:
    for tree in trees:
        masked: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for end in tree.ends:
            if end.num_rest:
                (dropped if end.is_dropped else masked)[end.reason] += end.num_rest
        found = TokenAccount(
            sampled=sum(end.node.num_sampled for end in tree.ends),
            trained=sum(end.num_trained for end in tree.ends),
            masked=dict(masked),
            dropped=dict(dropped),
        )
        assert found == tree.account, tree.one.execution


def test_all_trees_together_trained_what_the_steps_tell(
    branched: Driven, trees: list[ExecutionTree]
) -> None:
    told = sum(step.num_tokens for step in branched.all(StepReport))
    assert sum(tree.account.trained for tree in trees) == told > 0
    forks = Counter(fork for tree in trees for fork in tree.forks)
    assert forks["summary"] > 10
    assert forks["compaction"] > 0


def test_inspect_shows_a_tree_of_every_role(branched: Driven, trees: list[ExecutionTree]) -> None:
    widest = max(trees, key=lambda tree: len(tree.forks)).one.execution
    shown = CliRunner().invoke(run_app, ["inspect", str(branched.end.folder), widest])
    assert shown.exit_code == 0, shown.output
    roles = set(re.findall(r"  (main|main-summary|sub-agent|sub-agent-summary)  ", shown.stdout))
    assert len(roles) >= 3
    listed = CliRunner().invoke(run_app, ["inspect", str(branched.end.folder), "--step", "1"])
    assert len(listed.stdout.splitlines()) == 1 + 4 * 4
