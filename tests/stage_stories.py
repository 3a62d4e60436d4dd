"""Random stories of cells of P stages: who claims, pauses, joins, dies and when, drawn by a seed.

A fleet's cells are used by story after story: each begins with a restored core, and satellites
come back with whatever an earlier life left in flight.
"""

import contextlib
import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opengyre.seams.cells import CellBackend, MicroStep, Rendezvous, StepCounts, UpdateNorms
from opengyre.seams.weights import Snapshot
from opengyre.trainer.checkpoint import names_in, read_named
from opengyre.trainer.embedded import EmbeddedCell
from opengyre.trainer.loss import StreamedLoss
from opengyre.trainer.objectives.signature import ObjectiveSettings
from opengyre.trainer.optimizer import AdamWSettings
from opengyre.trainer.prefix_groups import GroupStore
from opengyre.trainer.stage import StageSettings
from opengyre.trainer.stream import StepStream, StreamSettings
from opengyre.trainer.wire import micro_step
from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.bundles import Bundle, Layout, Row
from opengyre.trajectory.groups import GroupSettings, Member, rows_of_group
from opengyre.trajectory.selection import SelectionSettings
from opengyre.transport.weights_shm import SharedMemoryPlane
from tests.cut_models import config_of, model_of
from tests.float64_models import in_float64
from tests.plain_training import Plain, PlainTrainer, Weights, logprobs_alone
from tests.random_trees import random_tree
from tests.stage_threads import staged_cell

NUM_GROUPS = 4
NUM_STEPS = 2
MAX_CELLS = 3
MAX_ROUNDS = 2000
BUNDLE_TOKENS = 24
TEMPERATURE = 0.7
KL = 0.3
CORE = 0
Groups = dict[str, tuple[Bundle, ...]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a fleet's cells compute."""

    family: str = "qwen3"
    is_tied: bool = True
    kl_coefficient: float = 0.0
    max_grad_norm: float = 0.05

    @property
    def settings(self) -> StageSettings:
        return StageSettings(
            loss=StreamedLoss(
                settings=ObjectiveSettings(clip_low=0.98, clip_high=1.02),
                kl_coefficient=self.kl_coefficient,
            ),
            optimizer=AdamWSettings(
                learning_rate=1e-2, warmup_updates=2, max_grad_norm=self.max_grad_norm
            ),
            temperature=TEMPERATURE,
        )

    def __str__(self) -> str:
        ends = "tied" if self.is_tied else "untied"
        return f"{self.family}, {ends}, kl {self.kl_coefficient}"


@functools.cache
def _made(family: str, *, is_tied: bool) -> Any:
    torch.set_num_threads(1)
    config = config_of(family, head_dim=4, tie_word_embeddings=is_tied)
    return in_float64(model_of(config))


def model(kind: Kind) -> Any:
    """Four layers in float64, the same at each call."""
    return copy.deepcopy(_made(kind.family, is_tied=kind.is_tied))


@functools.cache
def groups_of(family: str, layout: Layout, *, is_tied: bool) -> Groups:
    """Bundles by group: executions of one or more paths, one member without a verdict, one group
    without variance. Sampling logprobs are the model's with a drift, so that some paths clip."""
    module, numbers = _made(family, is_tied=is_tied), np.random.default_rng(5)
    settings = GroupSettings(
        selection=SelectionSettings(),
        baseline=Baseline.MEAN_STD,
        eps=1e-6,
        layout=layout,
        budget_tokens=BUNDLE_TOKENS,
    )

    def drifted(ids: Sequence[int]) -> Sequence[float]:
        if not ids:
            return []
        with torch.no_grad():
            told = logprobs_alone(module, ids, TEMPERATURE) + numbers.normal(0, 0.03)
        return [0.0, *told.tolist()]

    made = {}
    for index in range(NUM_STEPS * NUM_GROUPS):
        members = [
            Member(
                execution=f"e{index}.{place}",
                tree=random_tree(numbers, num_turns=4, logprobs_of=drifted),
                reward=None if (index, place) == (3, 0) else float(place) * (index != 2),
                seed=index,
            )
            for place in range(4)
        ]
        made[f"g{index}"] = rows_of_group(f"g{index}", members, settings=settings).bundles
    return made


def names_of(step: int) -> list[str]:
    return [f"g{index}" for index in range(step * NUM_GROUPS, (step + 1) * NUM_GROUPS)]


def rows_of_step(groups: Groups, step: int) -> list[Row]:
    return [row for name in names_of(step) for one in groups[name] for row in one.rows]


@functools.cache
def reference(kind: Kind) -> list[Plain]:
    """After each step of the stories, from the rows laid out path by path."""
    groups = groups_of(kind.family, Layout.PATH, is_tied=kind.is_tied)
    trainer = PlainTrainer(model(kind), kind.settings)
    return [trainer.update(rows_of_step(groups, step)) for step in range(NUM_STEPS)]


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """What lives already is not looked at by collections, of which every switch of roles has one
    for each stage: here all stages are in one process, with all that the tests imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Fleet:
    """Cells of `num_stages` each, made when first asked for. Number 0 is the core."""

    def __init__(self, kind: Kind, num_stages: int, folder: Path) -> None:
        self.kind = kind
        self.num_stages = num_stages
        self.folder = folder
        self.store = GroupStore()
        self._stack = contextlib.ExitStack()
        self._slots = itertools.count()
        self._cells: list[EmbeddedCell] = []
        self._start = folder / "start"

    def cell(self, number: int) -> EmbeddedCell:
        while len(self._cells) <= number:
            self._cells.append(self.make(is_core=not self._cells))
        return self._cells[number]

    def make(self, *, is_core: bool = True) -> EmbeddedCell:
        return self._stack.enter_context(
            staged_cell(
                model(self.kind),
                num_stages=self.num_stages,
                settings=self.kind.settings,
                make_plane=self.make_plane,
                is_core=is_core,
            )
        )

    def make_plane(self, name: str) -> SharedMemoryPlane:
        plane = SharedMemoryPlane(self.folder, slot=f"{name}.{next(self._slots)}")
        self._stack.callback(plane.close)
        return plane

    def restored_core(self) -> EmbeddedCell:
        """With the initial weights, and no update yet."""
        core = self.cell(CORE)
        if not self._start.exists():
            self._start.mkdir()
            core.save(str(self._start))
        core.restore(str(self._start))
        return core

    def moments(self) -> Weights:
        """The core's, by "exp_avg/name"."""
        folder = self.folder / f"moments{next(self._slots)}"
        folder.mkdir()
        self.cell(CORE).save(str(folder))
        made = read_named(folder, "optimizer", names_in(folder, "optimizer"))
        return {name: tensor.numpy() for name, tensor in made.items()}

    def close(self) -> None:
        self._stack.close()
        self.store.close()


def are_ends_equal(snapshot: Snapshot, name: str = "model.embed_tokens.weight") -> bool:
    """Every part that has `name` has the same bytes, and the first and the last one have it."""
    found = [
        [spec.checksum for spec in part.tensors if spec.name == name] for part in snapshot.parts
    ]
    ends = {number for part in found for number in part}
    return len(ends) == 1 and bool(found[0]) and bool(found[-1])


@dataclass
class _Tally:
    """What happened in a story, so that a test can tell that something did."""

    joins: int = 0
    drops: int = 0
    drops_in_flight: int = 0
    drops_exposed: int = 0
    idle_pauses: int = 0
    pauses: int = 0
    switches: int = 0
    num_returned: int = 0


@dataclass
class Story:
    """`seed` draws everything. `number` of a member is new in each life; 0 is the core's."""

    fleet: Fleet
    groups: Groups
    seed: int
    is_together: bool
    tally: _Tally = field(default_factory=_Tally)

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.seed)
        self.num_cells = int(self.numbers.choice([1, 2, 3, MAX_CELLS]))
        self.core = self.fleet.restored_core()
        self.core.enter_training()
        self.snapshot = self.core.expose_weights(0)
        self._members: dict[int, int] = {}

    def run(self, check: Callable[[int, UpdateNorms], None]) -> None:
        for step in range(NUM_STEPS):
            self._maybe_switch()
            norms = self.step(step)
            self.snapshot = self.core.expose_weights(step + 1)
            check(step, norms)

    def step(self, step: int) -> UpdateNorms:
        self._open(step)
        for _ in range(MAX_ROUNDS):
            self._anything()
            if self.stream.is_drained and self._reduced():
                return self.core.update(step + 1)
        raise AssertionError(f"seed {self.seed}: step {step} does not end")

    def _maybe_switch(self) -> None:
        """Satellites, and at times the core, leave training and enter it again later."""
        for place in range(self.num_cells):
            if self.numbers.random() < 0.3:
                self.fleet.cell(place).leave_training()
                self.tally.switches += 1
        self.core.enter_training()

    def _open(self, step: int) -> None:
        numbers = self.numbers
        settings = StreamSettings(
            budget_tokens=int(numbers.choice([1, 12, 24, 60])),
            lease_s=60.0,
            max_groups=NUM_GROUPS,
            lookahead_groups=int(numbers.integers(0, 3)),
            parts_per_cell=self.fleet.num_stages + 1,
        )
        self.stream = StepStream(
            step, version=step, bundles_of=self.groups.__getitem__, settings=settings
        )
        self._waiting = [str(name) for name in numbers.permutation(names_of(step))]
        self._offered: list[str] = []
        self._members = {CORE: CORE}
        self._next_member = 1
        self._drops_left = 2
        self.core.open_step(step, step, None)
        self.stream.admit(CORE)

    def _anything(self) -> None:
        moves = [self._claim] * 6 + [self._pause] * 3 + [self._arrive] * 2
        moves += [self._join, self._drop, self._close]
        moves[int(self.numbers.integers(len(moves)))]()

    def _any_member(self) -> int:
        return int(self.numbers.choice(sorted(self._members)))

    def _cell(self, member: int) -> CellBackend:
        return self.fleet.cell(self._members[member])

    def _arrive(self) -> None:
        if self._waiting:
            self._offered.append(self._waiting.pop())
            self.stream.offer(self._offered)

    def _claim(self) -> None:
        member = self._any_member()
        claim = self.stream.claim(member, 0.0)
        self._offered = [name for name in self._offered if name not in claim.assigned]
        if claim.micro_step is None:
            return
        if member != CORE and self._drops_left and self.numbers.random() < 0.03:
            self._lose(member)
            return
        self._tell(member, self._cell(member).run(claim.micro_step))

    def _pause(self) -> None:
        """Of one, or of all that is in flight; often of nothing."""
        member = self._any_member()
        for _ in range(int(self.numbers.integers(1, self.fleet.num_stages + 2))):
            ended = self._cell(member).finish_one()
            self._tell(member, ended)
            self.tally.pauses += bool(ended.micro_steps)
            self.tally.idle_pauses += not ended.micro_steps

    def _tell(self, member: int, ended: StepCounts) -> None:
        for number in ended.micro_steps:
            assert self.stream.done(member, number)

    def _join(self) -> None:
        free = [n for n in range(1, self.num_cells) if n not in self._members.values()]
        if self.stream.is_closed or not free:
            return
        cell = self.fleet.cell(free[0])
        if self.numbers.random() < 0.3:
            cell.leave_training()
        cell.enter_training()
        step = self.stream.step
        assert cell.open_step(step, self.stream.version, self.snapshot) == step
        member, self._next_member = self._next_member, self._next_member + 1
        assert self.stream.admit(member)
        self._members[member] = free[0]
        self.tally.joins += 1

    def _drop(self) -> None:
        satellites = sorted(set(self._members) - {CORE})
        if satellites and self._drops_left and self.numbers.random() < 0.3:
            self._lose(int(self.numbers.choice(satellites)))

    def _lose(self, member: int) -> None:
        """Whatever it holds is in flight for ever, until its cell is used again."""
        counters = self.stream.counters(member)
        self.tally.drops_in_flight += counters.num_claimed > counters.num_done
        back = self.stream.drop_member(member)
        self.tally.num_returned += counters.num_returned
        self.tally.drops += 1
        self._drops_left -= 1
        place = self._members.pop(member)
        self._offered = [*back, *self._offered]
        if not self.stream.is_closed:
            self.stream.offer(self._offered)
        if self.numbers.random() < 0.3:
            self.fleet.cell(place).drop_sums()

    def _close(self) -> None:
        if len(self.stream.assigned) == NUM_GROUPS and not self.stream.is_closed:
            self.stream.close(NUM_GROUPS)

    def _reduced(self) -> bool:
        """False if a member died on the way: its work is to be done again."""
        members = sorted(self._members)
        if self.is_together:
            counts = {one: self._cell(one).settle(self.stream.step)[0] for one in members}
        else:
            parts = {one: self._cell(one).expose_gradients(self.stream.step) for one in members[1:]}
            counts = {one: told for one, (_, told) in parts.items()}
        for one, told in counts.items():
            assert len(told.micro_steps) == self.stream.counters(one).num_done
        if self._drops_left and len(members) > 1 and self.numbers.random() < 0.3:
            self.tally.drops_exposed += 1
            self._lose(members[-1])
            if not self.stream.is_drained:
                return False
            return self._reduced()
        total = self._together(counts) if self.is_together else self.core.reduce([*parts.values()])
        self._check(total)
        return True

    def _together(self, counts: dict[int, StepCounts]) -> StepCounts:
        """All members at the same time, each in a thread of its own."""
        places = sorted(counts, key=lambda one: self._members[one])
        name = ".".join(str(self._members[one]) for one in places)

        def reduce(rank: int) -> StepCounts:
            place = Rendezvous(
                store=self.fleet.store.address, name=name, rank=rank, size=len(places)
            )
            others = [counts[one] for one in places if one != places[rank]]
            return self._cell(places[rank]).reduce_together(self.stream.step, place, others)

        with ThreadPoolExecutor(len(places)) as pool:
            totals = list(pool.map(reduce, range(len(places))))
        assert all(sorted(one.micro_steps) == sorted(totals[0].micro_steps) for one in totals)
        return totals[0]

    def _check(self, total: StepCounts) -> None:
        expected = self.stream.done_counts()
        assert sorted(total.micro_steps) == expected.micro_steps
        assert total.num_tokens == expected.num_tokens
        assert abs(total.num_executions - expected.num_executions) < 1e-9
        assert total.odd == ""


def step_alone(cell: CellBackend, groups: Groups, step: int, *, version: int = -1) -> UpdateNorms:
    """All groups of `step` by one core, in micro-steps of one bundle each."""
    version = step if version < 0 else version
    cell.open_step(step, version, None)
    for made in micro_steps_of(groups, step, version=version):
        cell.run(made)
    cell.reduce([])
    return cell.update(version + 1)


def micro_steps_of(groups: Groups, step: int, *, version: int = -1) -> list[MicroStep]:
    """One bundle in each, numbered in the order of the groups."""
    bundles = [one for name in names_of(step) for one in groups[name]]
    return [
        micro_step([one], step=step, number=number, version=step if version < 0 else version)
        for number, one in enumerate(bundles)
    ]
