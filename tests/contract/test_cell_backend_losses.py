"""Embedded cells with every averaging and with a divergence, in float64 against plain autograd."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import MicroStep, Segment, TrainedPath
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.loss import Averaging, StreamedLoss
from opengyre.trainer.objectives.catalog import OBJECTIVES
from opengyre.trainer.objectives.signature import ObjectiveSettings
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.float64_models import in_float64

VOCABULARY = 32
CONSTANT_TOKENS = 11
KL = 0.4
WIDE = ObjectiveSettings(clip_low=0.0, clip_high=100.0)
OPTIMIZER = AdamWSettings(learning_rate=1e-2, max_grad_norm=1e9)


@dataclass(frozen=True)
class _Path:
    execution: str
    ids: list[int]
    logprobs: list[float]
    advantage: float
    num_execution_tokens: int

    @property
    def num_trained(self) -> int:
        return len(self.ids) - 1


def _model() -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return in_float64(Qwen3ForCausalLM(config))


def _logprobs(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Of ids[1:], by a plain forward of one sequence."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    chosen: Tensor = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return chosen


@pytest.fixture(scope="module")
def paths() -> list[_Path]:
    """Five executions of one or two paths, whose sampling logprobs drift from the model's."""
    numbers, model, made = np.random.default_rng(7), _model(), []
    for place in range(5):
        lengths = [int(numbers.integers(3, 12)) for _ in range(1 + place % 2)]
        for num_tokens in lengths:
            ids = numbers.integers(0, VOCABULARY, num_tokens).tolist()
            with torch.no_grad():
                drift = torch.from_numpy(numbers.normal(0, 0.2, num_tokens - 1))
                logprobs = [0.0, *(_logprobs(model, ids) + drift).tolist()]
            num_trained = sum(lengths) - len(lengths)
            made.append(_Path(f"e{place}", ids, logprobs, place - 2.2, num_trained))
    return made


def _micro_step(number: int, paths: Sequence[_Path], *, step: int, version: int) -> MicroStep:
    starts = np.cumsum([0, *(len(path.ids) for path in paths)]).tolist()
    return MicroStep(
        step=step,
        number=number,
        version=version,
        token_ids=[one for path in paths for one in path.ids],
        position_ids=[at for path in paths for at in range(len(path.ids))],
        logprobs=[one for path in paths for one in path.logprobs],
        segments=[Segment(start=a, end=b) for a, b in pairwise(starts)],
        paths=[
            TrainedPath(
                execution=path.execution,
                group="g",
                turn="t",
                pieces=[(start, start + len(path.ids))],
                trained=[(start + 1, start + len(path.ids))],
                advantage=path.advantage,
                num_path_tokens=path.num_trained,
                num_execution_tokens=path.num_execution_tokens,
            )
            for start, path in zip(starts, paths, strict=False)
        ],
    )


class _Rig:
    def __init__(self, folder: Path, loss: StreamedLoss) -> None:
        self._folder = folder
        self._settings = StageSettings(loss=loss, optimizer=OPTIMIZER)
        self.planes: list[SharedMemoryPlane] = []

    def cell(self, module: nn.Module | None = None) -> EmbeddedCell:
        number = len(self.planes)
        self.planes += [SharedMemoryPlane(self._folder, slot=f"{kind}{number}") for kind in "wg"]
        return whole_cell(
            module or _model(),
            weights=self.planes[-2],
            gradients=self.planes[-1],
            settings=self._settings,
        )


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[list[_Rig]]:
    made: list[_Rig] = []
    yield made
    for rig in made:
        for plane in rig.planes:
            plane.close()


def _rig(rigs: list[_Rig], tmp_path: Path, loss: StreamedLoss) -> _Rig:
    rigs.append(_Rig(tmp_path, loss))
    return rigs[-1]


def _plain_loss(model: nn.Module, paths: Sequence[_Path], loss: StreamedLoss) -> Tensor:
    """GRPO without clipping and k3 to the initial model, averaged over whole executions."""
    initial, sums, nums = _model(), {}, {}
    for path in paths:
        new = _logprobs(model, path.ids)
        with torch.no_grad():
            reference = _logprobs(initial, path.ids)
        ratio = (new - torch.tensor(path.logprobs[1:], dtype=torch.float64)).exp()
        k3 = (reference - new).exp() - (reference - new) - 1
        tokens = -ratio * path.advantage + loss.kl_coefficient * k3
        sums[path.execution] = sums.get(path.execution, 0) + tokens.sum()
        nums[path.execution] = nums.get(path.execution, 0) + path.num_trained
    by_execution = {
        Averaging.EXECUTION: [sums[e] / nums[e] / len(sums) for e in sums],
        Averaging.TOKEN: [sums[e] / sum(nums.values()) for e in sums],
        Averaging.CONSTANT: [sums[e] / CONSTANT_TOKENS / len(sums) for e in sums],
    }[loss.averaging]
    return torch.stack(by_execution).sum()


def _after_plain_updates(paths: Sequence[_Path], loss: StreamedLoss) -> dict[str, np.ndarray]:
    model = _model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(2):
        adamw.zero_grad()
        _plain_loss(model, paths, loss).backward()
        adamw.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def _step(core: EmbeddedCell, satellite: EmbeddedCell, paths: Sequence[_Path], step: int) -> None:
    """The paths are dealt to two cells in micro-steps of one to three."""
    dealer = np.random.default_rng(step)
    order = dealer.permutation(len(paths)).tolist()
    core.open_step(step, step, None)
    satellite.open_step(step, step, core.expose_weights(step))
    number = 0
    while order:
        size = int(dealer.integers(1, 4))
        made = _micro_step(number, [paths[at] for at in order[:size]], step=step, version=step)
        (core if number % 2 else satellite).run(made)
        order, number = order[size:], number + 1
    core.reduce([satellite.expose_gradients(step)])
    assert core.update(step + 1).is_applied


def _worst_relative(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    return max(
        float(np.abs(array - second[name]).max() / np.abs(second[name]).max())
        for name, array in first.items()
    )


@pytest.mark.parametrize("kl_coefficient", [0.0, KL])
@pytest.mark.parametrize("averaging", list(Averaging))
def test_two_cells_and_a_restarted_one_update_as_plain_autograd_does(
    tmp_path: Path,
    paths: list[_Path],
    rigs: list[_Rig],
    averaging: Averaging,
    kl_coefficient: float,
) -> None:
    """The satellite of the second step is a new process's: its module begins with the initial
    weights, its reference stays there when it pulls newer ones."""
    loss = StreamedLoss(
        objective=OBJECTIVES["grpo"],
        settings=WIDE,
        averaging=averaging,
        constant_tokens=CONSTANT_TOKENS,
        kl_coefficient=kl_coefficient,
    )
    rig = _rig(rigs, tmp_path, loss)
    core = rig.cell()
    core.enter_training()
    for step in range(2):
        satellite = rig.cell()
        satellite.enter_training()
        _step(core, satellite, paths, step)
    assert _worst_relative(core.parameters(), _after_plain_updates(paths, loss)) < 1e-9


def test_the_reference_outlives_role_switches_and_leaves_the_weights_alone(
    tmp_path: Path, paths: list[_Path], rigs: list[_Rig]
) -> None:
    """With advantage 0 only the divergence acts; at the initial weights its gradient is 0."""
    loss = StreamedLoss(objective=OBJECTIVES["grpo"], settings=WIDE, kl_coefficient=KL)
    module = _model()
    cell = _rig(rigs, tmp_path, loss).cell(module)
    quiet = [_Path(one.execution, one.ids, one.logprobs, 0.0, 4) for one in paths]
    made = _micro_step(0, quiet, step=0, version=0)
    before = copy.deepcopy(dict(module.named_parameters()))
    added = []
    for weight_shift in (0.0, 0.05):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(weight_shift)
        cell.enter_training()
        cell.open_step(0, 0, None)
        added.append(cell.run(made))
        cell.leave_training()
    assert added[0].loss_sum == pytest.approx(0.0, abs=1e-14)
    assert added[1].divergence_sum > 1e-3
    assert added[1].loss_sum == pytest.approx(KL * added[1].divergence_sum / 4, rel=1e-12)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name] + 0.05)
