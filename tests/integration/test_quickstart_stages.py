"""The quickstart's own config, shortened, with cells of two pipeline stages."""

import json

import pytest
from quickstart_rig import QUICKSTART, SHORT, make_tasks
from run_rig import Driven, drive
from safetensors import safe_open

from opengyre.store.observations import MemberJoined, StepReport, VersionPublished
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(400)

MODEL = QUICKSTART.parent / "model" / "model.safetensors"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("staged")
    train = make_tasks(folder / "train", seed=21, num=8)
    held_out = make_tasks(folder / "eval", seed=22, num=2)
    sets = (f'eval.path="{held_out}"', "topology.stages_per_cell=2", *SHORT)
    return drive(folder, train, *sets, config=QUICKSTART, deadline_s=340)


def test_all_steps_are_made_and_every_promise_is_kept(staged: Driven) -> None:
    assert staged.end.exit_code == 0
    steps = staged.all(StepReport)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert steps[-1].version_after >= 1
    results = verify_run(open_run_folder(staged.end.folder))
    assert not [problem for result in results for problem in result.problems]
    assert all(result.is_kept for result in results)


def test_members_reduce_together_and_tell_of_both_stages(staged: Driven) -> None:
    assert staged.all(MemberJoined)
    for step in staged.all(StepReport):
        assert all(len(stages) == 2 for stages in step.stages.values())
        assert step.reduced_by == ("group" if len(step.stages) > 1 else "alone")
    assert any(step.reduced_by == "group" for step in staged.all(StepReport))
    worked = [one for step in staged.all(StepReport) for one in step.stages["c0"]]
    assert sum(one.forward_s for one in worked) > 0


def test_every_engine_verified_the_numbers_that_two_stages_exposed(staged: Driven) -> None:
    checksums: dict[int, set[int]] = {}
    for one in staged.all(VersionPublished):
        checksums.setdefault(one.version, set()).add(one.checksum)
    assert len(checksums) >= 2
    assert all(len(told) == 1 for told in checksums.values())


def test_the_checkpoint_has_every_weight_of_the_model_once(staged: Driven) -> None:
    newest = max(
        (staged.end.folder / "checkpoints").glob("step-*"), key=lambda one: int(one.name[5:])
    )
    index = json.loads((newest / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) == 2
    with safe_open(MODEL, framework="pt") as whole:
        assert set(index["weight_map"]) == set(whole.keys())
