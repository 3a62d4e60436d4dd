"""A tree's gradient is that of its paths one by one, whatever its shape.

Through the real cell in float64, against the same cell path by path and against a plain forward of
each path alone through the model's own attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.trainer import packed_model
from opengyre.trainer.desk import sums_name
from opengyre.trainer.embedded import whole_cell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.signature import ObjectiveSettings, OldPolicy, Trained
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.wire import add_counts, micro_step
from opengyre.trajectory.bundles import Bundle, Layout, Row, bundles_of
from opengyre.trajectory.packing import Filling, sort_for_packing
from opengyre.trajectory.tree import Tree, line_ids
from opengyre.transport.snapshots import pull_named
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.float64_models import in_float64
from tests.random_trees import Grower, Start, random_selection, random_tree, rows_of
from tests.training_rows import line_logprobs, trained_depths

VOCABULARY = 40
TEMPERATURE = 0.8
TOLERANCE = 1e-9
WHOLE = 10_000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}


def _model(family: str) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    made = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    }[family]()
    return in_float64(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """One model, trained by the real cell or by hand."""

    model: nn.Module
    folder: Path
    loss: StreamedLoss

    def logprobs_alone(self, ids: Sequence[int]) -> Tensor:
        """Logprob of each id but the first, by a plain forward of one sequence."""
        tokens = torch.tensor([list(ids)])
        logits = self.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        return (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]

    def sampled(self, numbers: np.random.Generator) -> Callable[[Sequence[int]], Sequence[float]]:
        """The model's own logprobs with a drift, so that some paths are cut and some are not."""

        def logprobs_of(ids: Sequence[int]) -> Sequence[float]:
            if not ids:
                return []
            with torch.no_grad():
                drifted = self.logprobs_alone(ids) + float(numbers.normal(0, 0.04))
            return [0.0, *drifted.tolist()]

        return logprobs_of

    def by_cell(self, micro_steps: Sequence[MicroStep]) -> tuple[np.ndarray, StepCounts]:
        planes = [SharedMemoryPlane(self.folder, slot=slot) for slot in "wg"]
        cell = whole_cell(
            self.model,
            weights=planes[0],
            gradients=planes[1],
            settings=StageSettings(
                loss=self.loss,
                optimizer=AdamWSettings(learning_rate=1e-3),
                temperature=TEMPERATURE,
            ),
        )
        cell.enter_training()
        cell.open_step(0, 0, None)
        counts = StepCounts()
        for one in micro_steps:
            counts = add_counts(counts, cell.run(one))
        gradient = np.empty(sum(p.numel() for p in self.model.parameters()))
        pull_named(planes[1], cell.expose_gradients(0)[0], {sums_name(0): gradient})
        cell.leave_training()
        for plane in planes:
            plane.close()
        return gradient, counts

    def by_hand(self, rows: Sequence[Row]) -> tuple[np.ndarray, StepCounts]:
        self.model.zero_grad()
        loss_sum, num_clipped = 0.0, 0
        for row in rows:
            at = torch.tensor(trained_depths(row.path))
            loss, num_cut = self.loss.summed(
                self.logprobs_alone(line_ids(row.path.leaf).tolist())[at - 1], _trained(row, at)
            )
            loss.backward()
            loss_sum, num_clipped = loss_sum + float(loss.detach()), num_clipped + num_cut
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]).numpy()
        return gradient, StepCounts(
            num_executions=sum(row.num_path_tokens / row.num_execution_tokens for row in rows),
            num_tokens=sum(row.num_path_tokens for row in rows),
            loss_sum=loss_sum,
            num_clipped=num_clipped,
        )


def _trained(row: Row, at: Tensor) -> Trained:
    def number(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    return Trained(
        logp_rollout=torch.tensor(line_logprobs(row.path), dtype=torch.float64)[at],
        path_of_token=torch.zeros_like(at),
        advantages=number(row.advantage),
        num_path_tokens=number(row.num_path_tokens),
        num_execution_tokens=number(row.num_execution_tokens),
    )


def _rig(folder: Path, family: str, old: OldPolicy) -> Rig:
    settings = ObjectiveSettings(old=old, clip_low=0.98, clip_high=1.02, max_token_weight=1.02)
    return Rig(model=_model(family), folder=folder, loss=StreamedLoss(settings=settings))


@pytest.fixture(params=[(family, old) for family in ("qwen3", "llama") for old in OldPolicy])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return _rig(tmp_path, *request.param)


@pytest.fixture(params=[("qwen3", OldPolicy.ROLLOUT), ("llama", OldPolicy.STEP)])
def some_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return _rig(tmp_path, *request.param)


def _micro_steps(bundles: Sequence[Bundle], budget_tokens: int) -> list[MicroStep]:
    waiting, made = list(bundles), []
    sort_for_packing(waiting)
    while waiting:
        filling = Filling(budget_tokens=budget_tokens)
        filling.take_from(waiting)
        made.append(micro_step(filling.bundles, step=0, number=len(made), version=0))
    return made


def _laid_out(executions: Sequence[Sequence[Row]], layout: Layout, budget: int) -> list[Bundle]:
    return [
        bundle
        for rows in executions
        for bundle in bundles_of(rows, layout=layout, budget_tokens=budget)
    ]


def _check_equal(rig: Rig, executions: Sequence[Sequence[Row]], *, budget_tokens: int) -> None:
    """Tree, path by path, and by hand; the layouts each in their own micro-steps."""
    want, counted = rig.by_hand([row for rows in executions for row in rows])
    for layout in Layout:
        bundles = _laid_out(executions, layout, budget_tokens)
        got, counts = rig.by_cell(_micro_steps(bundles, budget_tokens))
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max() > 0
        assert (counts.num_tokens, counts.num_clipped) == (
            counted.num_tokens,
            counted.num_clipped,
        )
        assert counts.num_executions == pytest.approx(counted.num_executions, rel=1e-12)
        assert counts.loss_sum == pytest.approx(counted.loss_sum, rel=TOLERANCE)


def _random_executions(rig: Rig, seed: int, *, max_paths: int) -> list[list[Row]]:
    numbers = np.random.default_rng(seed)
    executions: list[list[Row]] = []
    for number in range(3):
        tree = random_tree(
            numbers, num_turns=int(numbers.integers(4, 11)), logprobs_of=rig.sampled(numbers)
        )
        selection = random_selection(tree, numbers, max_paths=max_paths)
        advantage = float(numbers.normal())
        executions.append(rows_of(selection, execution=f"e{number}", advantage=advantage))
    return executions


@pytest.mark.parametrize(("seed", "max_paths"), [(0, 0), (3, 3)])
def test_random_trees_train_as_their_paths_do(rig: Rig, seed: int, max_paths: int) -> None:
    executions = _random_executions(rig, seed, max_paths=max_paths)
    _check_equal(rig, executions, budget_tokens=WHOLE)


@pytest.mark.parametrize(("seed", "budget_tokens"), [(11, 25), (12, 1)])
def test_trees_cut_by_the_budget_train_as_their_paths_do(
    rig: Rig, seed: int, budget_tokens: int
) -> None:
    executions = _random_executions(rig, seed, max_paths=0)
    bundles = _laid_out(executions, Layout.TREE, budget_tokens)
    assert len(bundles) > len(executions)
    _check_equal(rig, executions, budget_tokens=budget_tokens)


def _forked(rig: Rig, *starts: Start) -> Tree:
    """A trunk of two turns; each of `starts` leaves the trunk's end or the branch before it."""
    numbers = np.random.default_rng(3)
    grower = Grower(numbers, logprobs_of=rig.sampled(numbers))
    first = grower.add(None, Start.ROOT, num_injected=4, num_sampled=5)
    last = grower.add(first, Start.WHOLE, num_injected=4, num_sampled=5)
    for number, start in enumerate(starts):
        num_injected = 0 if start in (Start.SAME_PROMPT, Start.IN_SAMPLED) else 3
        node = grower.add(last, start, num_injected=num_injected, num_sampled=6)
        last = node if number % 2 else last
    return grower.tree


@pytest.mark.parametrize(
    "starts",
    [
        (Start.IN_SAMPLED, Start.IN_SAMPLED, Start.IN_SAMPLED),
        (Start.SAME_PROMPT, Start.SAME_PROMPT),
        (Start.IN_INJECTED, Start.IN_INJECTED),
        (Start.ABOVE, Start.WHOLE, Start.IN_SAMPLED, Start.SAME_PROMPT, Start.ABOVE),
        (Start.WHOLE, Start.ROOT, Start.ROOT),
    ],
    ids=["in a sampled span", "siblings", "in a prompt", "mixed", "roots"],
)
def test_each_kind_of_fork_trains_as_its_paths_do(some_rig: Rig, starts: tuple[Start, ...]) -> None:
    selection = random_selection(_forked(some_rig, *starts), np.random.default_rng(5))
    assert len(selection.paths) > 1
    _check_equal(some_rig, [rows_of(selection, advantage=-0.7)], budget_tokens=WHOLE)


def _ladder(rig: Rig) -> Tree:
    """Each branch is another answer below what it added to the branch before, and shorter."""
    numbers = np.random.default_rng(8)
    grower = Grower(numbers, logprobs_of=rig.sampled(numbers))
    last = grower.add(None, Start.ROOT, num_injected=4, num_sampled=32)
    for num_sampled in (24, 14, 4):
        last = grower.add(last, Start.SAME_PROMPT, num_injected=2, num_sampled=num_sampled)
    return grower.tree


def test_branches_of_branches_train_as_their_paths_do(some_rig: Rig) -> None:
    rows = rows_of(random_selection(_ladder(some_rig), np.random.default_rng(5)), advantage=0.4)
    (laid_out,) = _micro_steps(_laid_out([rows], Layout.TREE, WHOLE), WHOLE)
    assert max(len(one.ancestors) for one in laid_out.segments) >= 3
    _check_equal(some_rig, [rows], budget_tokens=WHOLE)


@pytest.mark.parametrize("masked_tokens", [1, 3])
def test_branches_longer_than_one_block_of_queries_train_as_their_paths_do(
    some_rig: Rig, masked_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "MASKED_TOKENS", masked_tokens)
    _check_equal(some_rig, _random_executions(some_rig, 21, max_paths=0), budget_tokens=WHOLE)


def test_both_clip_modes_cut_some_tokens_and_not_all(rig: Rig) -> None:
    rows = [
        row
        for seed in range(4)
        for one in _random_executions(rig, seed, max_paths=0)
        for row in one
    ]
    _, counts = rig.by_hand(rows)
    assert 0 < counts.num_clipped < counts.num_tokens
