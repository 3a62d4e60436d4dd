"""The tree of an execution as lines, as JSON and as a picture."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from recorded_tree import TreeTape, record_tree

from opengyre.seams.errors import ConfigError
from opengyre.trajectory.turns import ForkReason, Role
from opengyre.views.tree_json import chosen, execution_cells, tree_fields
from opengyre.views.tree_lines import tree_lines
from opengyre.views.tree_picture import COLOURS, draw_tree, tree_svg
from opengyre.views.trees import ExecutionTree, RunTrees, open_trees


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> RunTrees:
    return open_trees(record_tree(tmp_path_factory.mktemp("tokens")).rows)


def cells(lines: list[str]) -> dict[str, str]:
    """Lines of the table by their turns; what is printed between two spaces is one cell."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[2]: " | ".join(row) for row in rows}


def test_the_tree_is_told_with_a_line_for_each_stretch_and_its_forks(trees: RunTrees) -> None:
    lines = tree_lines(trees.of("e000001"))
    assert lines[:4] == [
        "e000001  group g00001, task trail-1, completed, 2 launches, step 0",
        "  reward 1, advantage +1.0000",
        "  97 tokens sampled = 60 trained + 24 masked (20 not_selected, 4 untrained_role)"
        " + 13 dropped (10 relaunched, 3 not_committed)",
        "  10 turns, 1 compaction, 1 relaunched, 1 retry, 1 side, 1 sub_agent, 1 summary",
    ]
    assert cells(lines[6:]) == {
        "t1": "root | main | t1 | - | 20 | 10 | 0 | 10 relaunched (dropped) | v0 | 1",
        "t2..t7#1 (3)": "relaunched, 1 retry | main | t2..t7#1 (3) | - | 80 | 30 | 30 | - | v0 | 1",
        "t7": "+- continued | main | t7 | - | 20 | 3 | 0 | 3 not_committed (dropped) | v0 | 1",
        "t9..t10 (2)": "+- compaction | main | t9..t10 (2) | 25 of t2 | 40 | 20 | 20 | -"
        " | v0-1 | 2",
        "t8": "+- summary | main-summary | t8 | 110 of t7#1 | 20 | 10 | 10 | - | v0 | 1",
        "t3": "side | side | t3 | - | 8 | 4 | 0 | 4 untrained_role (masked) | v0 | 1",
        "t5..t6 (2)": "sub_agent | sub-agent | t5..t6 (2) | - | 50 | 20 | 0"
        " | 20 not_selected (masked) | v0 | 1",
    }


def test_each_attempt_has_a_line_of_its_own_if_all_are_asked_for(trees: RunTrees) -> None:
    lines = tree_lines(trees.of("e000001"), is_all=True)
    assert len(lines) == 5 + 1 + 11
    (line,) = [one for one in lines if " t10 " in one]
    assert "6@s0/v0 4@c0/v1" in line


def test_what_no_step_consumed_says_why(trees: RunTrees) -> None:
    void, evaluation = trees.of("e000003"), trees.of("e000005")
    assert tree_lines(void)[0].endswith("completed, no step consumed it")
    assert tree_lines(void)[1] == "  no verdict"
    assert void.account.dropped == {"void_group": 10}
    assert evaluation.account.dropped == {"evaluation": 10}
    assert "10 evaluation (dropped)" in tree_lines(evaluation)[-1]


def test_the_json_holds_every_attempt_with_its_parent_and_adds_up(trees: RunTrees) -> None:
    told = tree_fields(trees.of("e000001"))
    assert [one["turn"] for one in told["turns"]][-2:] == ["t9", "t10"]
    by_turn = {(one["turn"], one["attempt"]): one for one in told["tree"]}
    assert told["tree"][by_turn["e000001.t9", 0]["parent"]]["turn"] == "e000001.t2"
    assert by_turn["e000001.t7", 0]["is_standing"] is False
    counts: Counter[str] = Counter()
    for one in told["tree"]:
        trained = sum(end - begin for begin, end in one["trained"])
        counts["trained"] += trained
        if one["reason"]:
            counts[one["reason"]] += one["sampled"] - trained
    tokens = told["tokens"]
    assert counts == {"trained": tokens["trained"], **tokens["masked"], **tokens["dropped"]}


def test_executions_are_chosen_by_group_step_and_reward(trees: RunTrees) -> None:
    every = [trees.of(name) for name in trees.state.executions]
    assert [one.one.execution for one in chosen(every, group="g00003")] == ["e000003", "e000004"]
    assert [one.one.execution for one in chosen(every, step=0)] == ["e000001", "e000002"]
    assert [one.one.execution for one in chosen(every, best=2)] == ["e000001", "e000005"]
    assert [one.one.execution for one in chosen(every, worst=1)] == ["e000002"]
    row = execution_cells(every[0])
    assert (row["trained"], row["masked"], row["dropped"]) == (60, 24, 13)
    assert (row["reward"], row["advantage"]) == (1.0, 1.0)
    assert execution_cells(every[4])["group"] == "eval"


def test_the_picture_is_whole_svg_with_a_bar_for_everything_sampled(
    trees: RunTrees, tmp_path: Path
) -> None:
    tree = trees.of("e000001")
    draw_tree(tree, tmp_path / "tree.svg")
    assert [one.name for one in tmp_path.iterdir()] == ["tree.svg"]
    root = ElementTree.parse(tmp_path / "tree.svg").getroot()
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 11
    assert any(one.startswith("e000001.t10 attempt 0, main, continued: 55 kept") for one in titles)
    bars = [one.attrib for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    legend = 1
    trained = [one for one in bars if one.get("fill") == COLOURS[Role.MAIN] and "y" in one]
    assert sum(one["height"] == "14" for one in trained) - legend == 5
    hatched = [one for one in bars if one.get("fill") == "url(#masked-sub-agent)"]
    assert len(hatched) == 2


def test_a_picture_that_cannot_be_written_is_refused_and_leaves_nothing(
    trees: RunTrees, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        draw_tree(trees.of("e000001"), tmp_path / "nowhere" / "tree.svg")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        draw_tree(trees.of("e000001"), tmp_path / "folder")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_turns_that_contradict_each_other_are_told_and_hide_no_other_execution(
    tmp_path: Path,
) -> None:
    def write(tape: TreeTape) -> None:
        tape.call("e000001.t1")
        tape.call("e000001.t2", parent="e000001.t1", kept=31)

    tape = TreeTape(tmp_path, first=write, is_trained=False)
    tape.write_all()
    trees = open_trees(tape.rows)
    broken = trees.of("e000001")
    assert tree_lines(broken)[-1].startswith("no tree: e000001.t2 keeps ")
    row = execution_cells(broken)
    assert (row["forks"], row["sampled"], row["dropped"]) == ("broken", 20, 20)
    assert execution_cells(trees.of("e000002"))["turns"] == 1


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> ExecutionTree:
    """500 turns: five compactions, a side call every ten turns, reasoning that is rewritten."""

    def write(tape: TreeTape) -> None:
        rewritten = {"fork_reason": ForkReason.REWRITTEN_REASONING.value}
        new_root = {"fork_reason": ForkReason.NEW_ROOT.value}
        kept, parent, is_cut = 0, "", False
        for number in range(1, 501):
            name = f"e000001.t{number}"
            if number % 10 == 0:
                tape.call(name, role=Role.SIDE, **new_root)
            elif number % 100 == 99:
                tape.call(name, parent=parent, kept=kept, role=Role.MAIN_SUMMARY)
            elif number % 100 == 1 and parent:
                tape.call(name, parent="e000001.t1", kept=15, **new_root)
                kept, parent, is_cut = 45, name, False
            else:
                tape.call(name, parent=parent, kept=kept, **(rewritten if is_cut else {}))
                is_cut = number % 3 == 2
                kept, parent = kept + (25 if is_cut else 30), name

    tape = TreeTape(tmp_path_factory.mktemp("long"), first=write)
    tape.write_all()
    return open_trees(tape.rows).of("e000001")


def test_an_execution_of_500_turns_fits_on_a_screen(long: ExecutionTree) -> None:
    lines = tree_lines(long)
    assert len(long.ends) == 500
    assert len(lines) < 25
    assert max(map(len, lines[4:])) < 160
    assert len(tree_lines(long, is_all=True)) == 6 + 500


def test_the_picture_of_500_turns_stays_small_and_shares_lanes(long: ExecutionTree) -> None:
    text = tree_svg(long)
    root = ElementTree.fromstring(text)
    assert float(root.attrib["height"]) < 700
    assert len(text) < 400_000
    assert "50 times side, the longest is t10<" in text
