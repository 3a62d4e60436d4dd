"""The page docs/training.md says what the code does, and its picture shows what the page says."""

import re
from pathlib import Path

import torch

from opengyre.config.root import RunConfig
from opengyre.engines.desk import STEP_DEADLINE_S
from opengyre.runtime.reduction import Form
from opengyre.runtime.run import CLAIM_LEASE_S
from opengyre.runtime.supervise import MAX_RESTARTS
from opengyre.store.observations import CellWork, StepReport
from opengyre.trainer.checkpoint import write_index, write_part
from opengyre.trainer.followers import ANSWER_S
from opengyre.trainer.group_limits import CHUNK_BYTES, DEFAULT
from opengyre.trainer.layers import MODEL_TYPES, layers_of_stage
from opengyre.trainer.pipeline.header import Command
from opengyre.views.run_state import RunState
from opengyre.views.tables import step_cells, work_cells
from tests.training_svg import Kind, Span, broken_rules, spans_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
WORDS = (ROOT / "docs" / "words.md").read_text()
SPANS = spans_of((ROOT / "docs" / "training.svg").read_text())
NUM_STAGES = 2


def rows(first_column: str) -> list[list[str]]:
    """The cells of the table whose first column has this name."""
    table = PAGE.partition(f"\n| {first_column} |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _of(kind: Kind) -> list[Span]:
    return [one for one in SPANS if one.kind is kind]


def test_in_the_picture_every_micro_step_goes_down_and_up_one_cell_and_all_end_together() -> None:
    assert broken_rules(SPANS, num_stages=NUM_STAGES) == []


def test_the_picture_shows_two_cells_join_in_mid_batch_a_gap_and_the_end_of_the_window() -> None:
    begun_s = min(one.begin_s for one in _of(Kind.FORWARD))
    (closed,) = _of(Kind.CLOSED)
    pulls = {one.cell: one for one in _of(Kind.PULL)}
    assert sorted(pulls) == [1, 2]
    assert all(begun_s < one.begin_s < one.end_s < closed.begin_s for one in pulls.values())
    rests = [one for one in _of(Kind.REST) if one.end_s - one.begin_s > 0.1]
    assert {one.cell for one in rests} == {0, 1}
    after = next(one for one in _of(Kind.READY) if one.number == 5)
    assert all(one.end_s >= after.begin_s for one in rests)
    assert all(one.begin_s < closed.begin_s for one in _of(Kind.READY))


def test_the_picture_has_smaller_micro_steps_near_the_end() -> None:
    sizes = {one.number: one.num_tokens for one in _of(Kind.FORWARD)}
    assert max(sizes[number] for number in sorted(sizes)[-3:]) < max(sizes.values())


def test_every_command_of_the_executor_is_explained_once() -> None:
    assert [names(row[0])[0] for row in rows("command")] == [one.name for one in Command]


def test_every_form_of_a_reduction_is_explained_once() -> None:
    assert [names(row[0])[0] for row in rows("`reduced`")] == [one.value for one in Form]


def test_every_key_exists_and_its_default_is_the_one_that_stands_there() -> None:
    told = {names(row[0])[0]: row[1].strip("`") for row in rows("key")}
    assert len(told) == 13
    for key, default in told.items():
        section, _, name = key.partition(".")
        fields = RunConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        value = fields[name].default
        assert (default.strip('"') if isinstance(value, str) else float(default)) == value, key


def test_the_limits_are_those_of_the_code() -> None:
    told = {row[0]: float(row[1]) for row in rows("limit")}
    assert told == {
        "lease of a claim": CLAIM_LEASE_S,
        "settle": DEFAULT.settle_s,
        "making a group": DEFAULT.construct_s,
        "one chunk through a group": DEFAULT.stall_s,
        "a whole reduce": DEFAULT.reduce_s,
        "an order to a stage": ANSWER_S,
        "a step of an engine": STEP_DEADLINE_S,
    }
    assert DEFAULT.star_s == DEFAULT.reduce_s
    assert f"| {CHUNK_BYTES // 2**20} MiB of sums |" in PAGE
    assert MAX_RESTARTS == 3
    assert "at most three times in a run" in PAGE


def test_the_layers_of_stages_are_those_of_the_code() -> None:
    assert len(rows("layers")) == 3
    for num_layers, num_stages, told in rows("layers"):
        made = [
            len(layers_of_stage(int(num_layers), stage=stage, num_stages=int(num_stages)))
            for stage in range(int(num_stages))
        ]
        assert told == " ".join(str(one) for one in made)


def test_the_models_that_can_be_cut_are_those_of_the_code() -> None:
    (can,) = [row for row in rows("models") if row[1] == "cut by layers"]
    assert names(can[0]) == list(MODEL_TYPES)


def test_a_checkpoint_has_the_files_that_stand_there(tmp_path: Path) -> None:
    for kind in ("model", "optimizer"):
        for stage in range(NUM_STAGES):
            tensors = {f"{kind}{stage}": torch.zeros(1)}
            write_part(tmp_path, kind, tensors, stage=stage, num_stages=NUM_STAGES)
        write_index(tmp_path, kind, num_stages=NUM_STAGES)
    block = PAGE.partition("With two stages:\n\n```\n")[2].partition("```")[0]
    told = [line.split()[0] for line in block.splitlines()]
    made = sorted(one.name for one in tmp_path.iterdir())
    assert sorted(told) == sorted([*made, "trainer.json", "manifest.json"])


def test_the_columns_that_are_explained_are_those_of_gyre_run_show() -> None:
    told = [name for row in rows("column") for name in names(row[0])]
    work = work_cells(_state())[0]
    steps = step_cells(_state())[0]
    assert set(told) == (set(work) - {"step", "cell"}) | {"reduced", "reduce s"}
    assert {"reduced", "reduce s"} <= set(steps)
    header, *lines = PAGE.partition("which two cells joined in mid-batch:\n\n```\n")[2].splitlines()
    assert header.split() == " ".join(work).split()
    assert [line.split()[1] for line in lines[:3]] == ["c0", "c1", "c2"]


def test_every_figure_stands_in_the_page_of_measurements() -> None:
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    figures = re.findall(r"\d+\.\d+", PAGE.partition("## Numbers")[2].partition("\n## ")[0])
    assert len(figures) > 8
    assert [one for one in figures if one not in measured] == []


def test_files_and_pages_that_the_page_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"`((?:tests|trainer|runtime)/[\w/]+(?:\.py)?)/?`", PAGE):
        assert (ROOT / path).exists() or (ROOT / "src" / "opengyre" / path).exists(), path


def test_the_words_of_training_stand_in_the_list_of_words() -> None:
    told = re.findall(r"^\| ([^|]+) \|", WORDS.partition("## Training")[2], re.MULTILINE)
    wanted = ["lead, follower", "order", "micro-step", "look-ahead", "snapshot, part", "window"]
    wanted += ["settle", "prefix group", "star", "bubble", "waiting", "at rest"]
    assert [one for one in wanted if one not in told] == []


def _state() -> RunState:
    state = RunState()
    state.steps.append(
        StepReport(
            step=1,
            version_before=0,
            version_after=1,
            groups=[],
            micro_steps=[],
            num_executions=0,
            num_tokens=0,
            loss=None,
            grad_norm=None,
            is_applied=True,
            is_short=False,
            mean_reward=None,
            opened_s=0.0,
            closed_s=1.0,
            cells={"c0": CellWork(num_claimed=0, num_done=0, num_tokens=0)},
        )
    )
    return state
