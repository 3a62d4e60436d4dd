"""P7, P8, P9, P20: for a given set of groups the update does not depend on who ran what.

A tiny float64 model is updated twice through the stream, the cells and a shared-memory weight
plane; the reference runs every path alone through the model's own attention and plain AdamW.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.seams.cells import CellBackend, StepCounts, UpdateNorms
from opengyre.seams.errors import BoundaryError
from opengyre.seams.weights import Snapshot
from opengyre.trainer.embedded import whole_cell
from opengyre.trainer.emulated import EmulatedCell, EmulatedSettings
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.signature import ObjectiveSettings
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.bundles import Bundle, Layout, Row
from opengyre.trajectory.groups import GroupSettings, Member, rows_of_group
from opengyre.trajectory.selection import SelectionSettings
from opengyre.trajectory.tree import Tree, line_ids
from opengyre.trajectory.turns import ForkReason, Role, SampledSpan, TurnTokens
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.float64_models import in_float64
from tests.plain_training import PlainTrainer, Weights, logprobs_alone, worst_relative
from tests.training_rows import trained_depths, tree_of_line

VOCABULARY = 48
NUM_GROUPS = 6
NUM_STEPS = 2
TEMPERATURE = 0.7
OPTIMIZER = AdamWSettings(learning_rate=1e-2, warmup_updates=2, max_grad_norm=0.05)
OBJECTIVE = ObjectiveSettings(clip_low=0.98, clip_high=1.02)
SETTINGS = StageSettings(
    loss=StreamedLoss(settings=OBJECTIVE), optimizer=OPTIMIZER, temperature=TEMPERATURE
)
MakeRun = Callable[["_Story"], "_Run"]
MAX_ROUNDS = 200
BUNDLE_TOKENS = 40


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return in_float64(Qwen3ForCausalLM(config))


def _tree(model: Qwen3ForCausalLM, numbers: np.random.Generator, *, is_forked: bool) -> Tree:
    """Random tokens; sampling logprobs are the model's with a drift, so that some paths clip. A
    fork goes on from within what was sampled."""
    num_tokens = int(numbers.integers(5, 24))
    ids = numbers.integers(0, VOCABULARY, num_tokens).tolist()
    mask = [0, *(numbers.random(num_tokens - 1) < 0.6).astype(int).tolist()]
    mask[-1] = 1
    drift = float(numbers.normal(0, 0.03))
    tree = tree_of_line(ids, mask, _drifted(model, ids, drift))
    if is_forked:
        last = tree.nodes[-1]
        num_kept = int(numbers.integers(max(1, last.begin), last.end))
        branch = [*ids[:num_kept], *numbers.integers(0, VOCABULARY, 6).tolist()]
        tree.insert(
            TurnTokens(
                turn="e1.t99",
                attempt=0,
                parent=last.turn,
                fork_reason=ForkReason.REWRITTEN_TURN,
                role=Role.MAIN,
                is_committed=True,
                num_kept_tokens=num_kept,
                new_prompt_ids=branch[num_kept:-5],
                completion_ids=branch[-5:],
                logprobs=_drifted(model, branch, drift)[-5:],
                spans=(SampledSpan(start=0, end=5, version=0, engine="c0#1"),),
            )
        )
    return tree


def _drifted(model: Qwen3ForCausalLM, ids: Sequence[int], drift: float) -> list[float]:
    with torch.no_grad():
        return [0.0, *(logprobs_alone(model, ids, TEMPERATURE) + drift).tolist()]


@pytest.fixture(scope="module", params=list(Layout))
def groups(request: pytest.FixtureRequest) -> dict[str, tuple[Bundle, ...]]:
    """Bundles by group: mixed lengths, two paths in some executions, one member without a verdict,
    one group without variance."""
    torch.set_num_threads(1)
    model, numbers = _model(), np.random.default_rng(5)
    settings = GroupSettings(
        selection=SelectionSettings(),
        baseline=Baseline.MEAN_STD,
        eps=1e-6,
        layout=request.param,
        budget_tokens=BUNDLE_TOKENS,
    )
    made = {}
    for index in range(NUM_STEPS * NUM_GROUPS):
        members = []
        for place in range(4):
            reward = 0.5 if index == 2 else float(numbers.random())
            members.append(
                Member(
                    execution=f"e{index}.{place}",
                    tree=_tree(model, numbers, is_forked=place == 1),
                    reward=None if (index, place) == (3, 0) else reward,
                    seed=index,
                )
            )
        name = f"g{index}"
        made[name] = rows_of_group(name, members, settings=settings).bundles
    return made


def _names(step: int) -> list[str]:
    return [f"g{index}" for index in range(step * NUM_GROUPS, (step + 1) * NUM_GROUPS)]


@pytest.fixture(scope="module")
def reference(groups: dict[str, tuple[Bundle, ...]]) -> list[Weights]:
    """Weights after each step: every path alone, the formulas written out, plain AdamW."""
    trainer = PlainTrainer(_model(), SETTINGS)
    return [
        trainer.update(
            [r for name in _names(step) for one in groups[name] for r in one.rows]
        ).weights
        for step in range(NUM_STEPS)
    ]


@dataclass(frozen=True, kw_only=True)
class _Story:
    """What happens in every step: (claims so far, what, cell), in order. A cell that dies holds
    a claim. `dies_late`: a cell that dies when everything was claimed."""

    events: tuple[tuple[int, str, int], ...] = ()
    dies_late: int | None = None
    budget_tokens: int = 40
    is_reversed: bool = False

    @property
    def has_death(self) -> bool:
        return self.dies_late is not None or any(what == "die" for _, what, _ in self.events)


STORIES = {
    "one cell": _Story(budget_tokens=64),
    "one cell, another order, one path at a time": _Story(budget_tokens=1, is_reversed=True),
    "three cells": _Story(events=((0, "join", 1), (1, "join", 2))),
    "a late join": _Story(events=((6, "join", 1),)),
    "a killed satellite": _Story(events=((0, "join", 1), (2, "join", 2), (7, "die", 1))),
    "a satellite killed after all was claimed": _Story(events=((0, "join", 1),), dies_late=1),
    "two deaths and a join between them": _Story(
        events=((0, "join", 1), (4, "die", 1), (5, "join", 2), (9, "die", 2))
    ),
}


def _stream(step: int, groups: dict[str, tuple[Bundle, ...]], budget_tokens: int) -> StepStream:
    settings = StreamSettings(budget_tokens=budget_tokens, lease_s=60.0, max_groups=NUM_GROUPS)
    return StepStream(step, version=step, bundles_of=groups.__getitem__, settings=settings)


class _Run:
    """A core, its satellites and the stream, in one process."""

    def __init__(self, folder: Path, groups: dict[str, tuple[Bundle, ...]], story: _Story) -> None:
        self._folder = folder
        self._groups = groups
        self._story = story
        self._planes: list[SharedMemoryPlane] = []
        self.core = self.make_cell("core")
        self.satellites: dict[int, CellBackend] = {}
        self.num_returned = 0
        self._waiting: list[str] = []

    def make_cell(self, name: str) -> CellBackend:
        weights, gradients = self.make_plane(f"{name}.w"), self.make_plane(f"{name}.g")
        return whole_cell(_model(), weights=weights, gradients=gradients, settings=SETTINGS)

    def make_plane(self, slot: str) -> SharedMemoryPlane:
        slot = f"{slot}.{len(self._planes)}"
        self._planes.append(SharedMemoryPlane(self._folder, slot=slot))
        return self._planes[-1]

    def close(self) -> None:
        for plane in self._planes:
            plane.close()

    def step(self, step: int) -> UpdateNorms:
        return self.commit(self.drain(step))

    def drain(self, step: int) -> StepStream:
        """Everything up to the reduce."""
        stream = self.open(step)
        snapshot = self.core.expose_weights(step)
        events = list(self._story.events)
        num_claims = 0
        for _ in range(MAX_ROUNDS):
            while events and num_claims >= events[0][0]:
                _, what, cell = events.pop(0)
                self._join(stream, cell, snapshot) if what == "join" else self._kill(stream, cell)
            if not stream.is_closed:
                stream.offer(self._waiting[:2])
            num_claims += sum(self.claim(stream, cell) for cell in stream.members)
            if not self._waiting and not stream.is_closed:
                stream.close(NUM_GROUPS)
                if self._story.dies_late is not None:
                    self._kill(stream, self._story.dies_late)
            if stream.is_drained:
                break
        assert events == []
        return stream

    def open(self, step: int) -> StepStream:
        self.satellites = {}
        self._waiting = _names(step)[:: -1 if self._story.is_reversed else 1]
        self.core.enter_training()
        stream = _stream(step, self._groups, self._story.budget_tokens)
        stream.admit(0)
        self.core.open_step(step, step, None)
        return stream

    def _join(self, stream: StepStream, cell: int, snapshot: Snapshot) -> None:
        satellite = self.make_cell(f"satellite{cell}")
        satellite.enter_training()
        assert satellite.open_step(stream.step, stream.version, snapshot) == stream.version
        assert stream.admit(cell)
        self.satellites[cell] = satellite

    def _kill(self, stream: StepStream, cell: int) -> None:
        """It dies with a claim in hand; what it had summed is lost with it."""
        for group in stream.claim(cell, 0.0).assigned:
            self._waiting.remove(group)
        del self.satellites[cell]
        self._waiting[:0] = stream.drop_member(cell)
        self.num_returned += stream.counters(cell).num_returned

    def claim(self, stream: StepStream, number: int) -> bool:
        """One claim and its backward; newly assigned groups are waiting no more."""
        claim = stream.claim(number, 0.0)
        self._waiting = [group for group in self._waiting if group not in claim.assigned]
        if claim.micro_step is None:
            return False
        (self.core if number == 0 else self.satellites[number]).run(claim.micro_step)
        assert stream.done(number, claim.micro_step.number)
        return True

    def commit(self, stream: StepStream) -> UpdateNorms:
        parts = [cell.expose_gradients(stream.step) for _, cell in sorted(self.satellites.items())]
        counts = self.core.reduce(parts)
        expected = stream.done_counts()
        assert sorted(counts.micro_steps) == expected.micro_steps
        assert counts.num_executions == pytest.approx(expected.num_executions, rel=1e-12)
        return self.core.update(stream.version + 1)


class _EmulatedRun(_Run):
    def make_cell(self, name: str) -> CellBackend:
        weights, gradients = self.make_plane(f"{name}.w"), self.make_plane(f"{name}.g")
        return EmulatedCell(weights=weights, gradients=gradients, settings=EmulatedSettings())


@pytest.fixture
def make_run(tmp_path: Path, groups: dict[str, tuple[Bundle, ...]]) -> Iterator[MakeRun]:
    made: list[_Run] = []

    def make(story: _Story) -> _Run:
        made.append(_Run(tmp_path, groups, story))
        return made[-1]

    yield make
    for run in made:
        run.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("title", list(STORIES))
def test_two_updates_equal_the_reference_whoever_ran_what(
    title: str, make_run: MakeRun, reference: list[Weights]
) -> None:
    story = STORIES[title]
    run = make_run(story)
    for step in range(NUM_STEPS):
        norms = run.step(step)
        assert norms.is_applied
        assert norms.grad_norm > OPTIMIZER.max_grad_norm
        assert worst_relative(run.core.parameters(), reference[step]) < 1e-9
    assert (run.num_returned > 0) is story.has_death


def test_integer_sums_of_the_emulated_cell_are_equal_bit_for_bit(
    tmp_path: Path, groups: dict[str, tuple[Bundle, ...]]
) -> None:
    weights = set()
    for story in STORIES.values():
        run = _EmulatedRun(tmp_path, groups, story)
        for step in range(NUM_STEPS):
            assert run.step(step).is_applied
        weights.add(run.core.parameters()["weights"].tobytes())
        run.close()
    assert len(weights) == 1


def test_tokens_of_better_executions_become_likelier_and_of_worse_ones_less(
    make_run: MakeRun, groups: dict[str, tuple[Bundle, ...]]
) -> None:
    run = make_run(STORIES["one cell"])
    run.step(0)
    after = _model()
    after.load_state_dict(
        {name: torch.from_numpy(array) for name, array in run.core.parameters().items()},
        strict=False,
    )
    rows = [row for bundle in groups["g0"] for row in bundle.rows]
    moved = [_gain(_model(), after, row) * row.advantage for row in rows]
    assert sum(moved) > 0


def _gain(before: Qwen3ForCausalLM, after: Qwen3ForCausalLM, row: Row) -> float:
    """Change of the trained tokens' mean logprob."""
    depths = torch.tensor(trained_depths(row.path))
    ids = line_ids(row.path.leaf).tolist()
    with torch.no_grad():
        gains = logprobs_alone(after, ids, TEMPERATURE) - logprobs_alone(before, ids, TEMPERATURE)
    return float(gains[depths - 1].mean())


def test_a_satellite_that_dies_in_the_reduce_costs_only_its_part(
    make_run: MakeRun, reference: list[Weights]
) -> None:
    run = make_run(STORIES["three cells"])
    stream = run.drain(0)
    parts = [cell.expose_gradients(0) for cell in run.satellites.values()]
    Path(parts[1][0].parts[0].address).unlink()
    with pytest.raises(BoundaryError, match="gone"):
        run.core.reduce(parts)
    stream.drop_member(2)
    del run.satellites[2]
    while not stream.is_drained:
        run.claim(stream, 1)
        run.claim(stream, 0)
    assert run.commit(stream).is_applied
    assert worst_relative(run.core.parameters(), reference[0]) < 1e-9


def test_a_number_that_is_not_finite_never_reaches_the_weights(make_run: MakeRun) -> None:
    run = make_run(STORIES["three cells"])
    stream = run.drain(0)
    before = run.core.parameters()
    snapshot, counts = run.satellites[1].expose_gradients(0)
    sums = np.zeros(snapshot.tensors[0].shape)
    sums[next(iter(before.values())).size + 3] = np.inf
    bad = Snapshot(version=0, parts=[run.make_plane("poison").expose({"sums.0": sums}, 0)])
    run.core.reduce([(bad, counts)])
    norms = run.core.update(1)
    assert not norms.is_applied
    assert norms.reason == f"the sum of the gradients of {list(before)[1]} is not finite"
    assert all((array == before[name]).all() for name, array in run.core.parameters().items())
    assert run.step(0).is_applied
    assert stream.is_drained


def _satellite(channel: Connection, folder: str) -> None:
    """A satellite's process: pull the snapshot, run what arrives, expose; the parent kills it."""
    torch.set_num_threads(1)
    planes = [SharedMemoryPlane(Path(folder), slot=f"process.{kind}") for kind in "wg"]
    cell = whole_cell(_model(), weights=planes[0], gradients=planes[1], settings=SETTINGS)
    while True:
        what, value = channel.recv()
        if what == "open":
            cell.enter_training()
            channel.send(cell.open_step(value.version, value.version, value))
        elif what == "run":
            channel.send(cell.run(value))
        else:
            channel.send(cell.expose_gradients(value))


class _SatelliteProcess:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self.process = context.Process(target=_satellite, args=(theirs, str(folder)), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, value: object) -> object:
        self._channel.send((what, value))
        assert self._channel.poll(60), "the satellite does not answer"
        return self._channel.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        self._channel.close()


def test_a_satellite_process_joins_works_and_is_killed_without_a_trace_in_the_update(
    make_run: MakeRun, reference: list[Weights], tmp_path: Path
) -> None:
    run = make_run(_Story())
    satellite = _SatelliteProcess(tmp_path)
    try:
        stream = run.open(0)
        assert satellite.ask("open", run.core.expose_weights(0)) == 0
        stream.admit(1)
        stream.offer(_names(0))
        for _ in range(3):
            made = stream.claim(1, 0.0).micro_step
            assert made is not None
            counts = satellite.ask("run", made)
            assert isinstance(counts, StepCounts)
            assert counts.micro_steps == [made.number]
            stream.done(1, made.number)
            run.claim(stream, 0)
        exposed = satellite.ask("expose", 0)
        assert isinstance(exposed, tuple)
        assert exposed[1].num_tokens > 0
    finally:
        satellite.kill()
    stream.drop_member(1)
    stream.offer([name for name in _names(0) if name not in stream.assigned])
    for _ in range(MAX_ROUNDS):
        run.claim(stream, 0)
        if len(stream.assigned) == NUM_GROUPS and not stream.is_closed:
            stream.close(NUM_GROUPS)
        if stream.is_drained:
            break
    assert run.commit(stream).is_applied
    assert worst_relative(run.core.parameters(), reference[0]) < 1e-9
    leftover = SharedMemoryPlane(tmp_path, slot="process.g")
    leftover.expose({"sums": np.zeros(1)}, 0)
    leftover.close()
