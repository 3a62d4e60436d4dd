"""The study's curves: what is changed along each, and what is compared.

Owns: one function a figure. Must not know: pictures, files. Invariant: a figure is made of runs
alone; its errors are two standard errors over seeds, paired where two layouts are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lab import (
    UNIT,
    Bias,
    Lab,
    best_split,
    bias_of_dropping,
    colocated,
    elastic,
    per_device_day,
    percent,
    split,
)

from opengyre.simulate.plan import Trials, Tried, plan
from opengyre.simulate.plan_layout import Layout
from opengyre.simulate.plan_workload import at_share

BUDGETS = (8, 16, 32, 64)
CELL_COUNTS = (1, 2, 4, 8)
TRAINING_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
TIME_OUT_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
PREFILL_RATES = (20_000, 5_000, 1_000, 250)
PULLS_S = (0, 30, 120, 600, 1_800)
SHAPES = ((3, 1), (4, 0))
PATIENT = ("schedule.join_deadline_s=36000", "schedule.publish_timeout_s=36000")
SUPPLY_FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)
SUPPLY_HOLDS_S = (0, 30, 100, 300, 900, 1_800)
TARGETS = (1, 2, 3, 4, 6)
BOUNDS = (3, 4, 5, 6)
LONG_TAIL = ("workload.sigma_between=0.6", "workload.overall_cap_s=1e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`points`: (value, two standard errors) at each x of its panel."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    x_label: str
    y_label: str
    xs: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    panels: tuple[Panel, ...]


def budget(lab: Lab) -> Figure:
    """The best layouts of each budget, found by `gyre plan`'s search."""
    fixed = [_planned(lab.trials(num_devices=num)) for num in BUDGETS]
    grown = [
        _planned(lab.trials(f"schedule.groups_per_step={num // 2}", num_devices=num))
        for num in BUDGETS
    ]
    xs = tuple(str(num) for num in BUDGETS)
    panels = [
        Panel(
            x_label=f"nodes, {words}",
            y_label="groups per node-day",
            xs=xs,
            lines=tuple(
                Line(label=name, points=tuple(per_device_day(one[name]) for one in found))
                for name in ("elastic", "colocate", "async")
            ),
        )
        for words, found in (("16 groups a step", fixed), ("nodes / 2 groups a step", grown))
    ]
    gains = Panel(
        x_label="nodes",
        y_label="% over the best static split",
        xs=xs,
        lines=tuple(
            Line(
                label=words,
                points=tuple(percent(one["elastic"], one["async"]) for one in found),
            )
            for words, found in (("16 groups a step", fixed), ("nodes / 2 groups a step", grown))
        ),
    )
    return Figure(name="budget", panels=(*panels, gains))


def cells(lab: Lab) -> Figure:
    """32 nodes as fewer or more cells, down to E0's 4 nodes; each with the better (mu, phi)."""
    panels = []
    for words, sets in (("as fitted", ()), ("a long tail", LONG_TAIL)):
        trials = lab.trials(*sets)
        static = best_split(lab, trials)
        tried = [_of_cells(lab, trials, num) for num in CELL_COUNTS]
        panels.append(
            Panel(
                x_label=f"cells of 32 nodes, workload {words}",
                y_label="% over the best static split",
                xs=tuple(str(num) for num in CELL_COUNTS),
                lines=(_line("elastic (1 cell: colocate)", [percent(a, static) for a in tried]),),
            )
        )
    return Figure(name="cells", panels=tuple(panels))


def time_out(lab: Lab) -> Figure:
    """Executions piled at a graded time-out of the harness."""
    over: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("colocate", "colocate + 4 standalone", "best static split")
    }
    for share in TIME_OUT_SHARES:
        trials = lab.trials(piled_share=share)
        ours = _of_cells(lab, trials, 8)
        whole, alone = (
            _better(lab, trials, [colocated(trials, num, shape) for shape in SHAPES])
            for num in (0, 1)
        )
        rivals = (whole, alone, best_split(lab, trials))
        for name, rival in zip(over, rivals, strict=True):
            over[name].append(percent(ours, rival))
    panel = Panel(
        x_label="executions that end at the time-out",
        y_label="% of elastic over it",
        xs=tuple(f"{share:.0%}" for share in TIME_OUT_SHARES),
        lines=tuple(_line(name, points) for name, points in over.items()),
    )
    return Figure(name="time_out", panels=(panel,))


def training(lab: Lab) -> Figure:
    """Training takes more and more of the device-seconds; satellites that add 95 % or all of their
    devices. A static split trains in one cell, which has no satellites."""
    lines = []
    for efficiency in (0.95, 1.0):
        points = []
        for share in TRAINING_SHARES:
            base = lab.trials(f"costs.training.efficiency={efficiency}")
            trials = replace(base, config=at_share(base.config, base.workload, share))
            units = trials.space.splits(share)
            static = _better(lab, trials, [split(trials, UNIT * num, (1, 3)) for num in units])
            points.append(percent(_of_cells(lab, trials, 8), static))
        lines.append(_line(f"a satellite adds {efficiency:.0%}", points))
    panel = Panel(
        x_label="training share of the device-seconds",
        y_label="% over the best static split",
        xs=tuple(f"{share:.0%}" for share in TRAINING_SHARES),
        lines=tuple(lines),
    )
    return Figure(name="training", panels=(panel,))


def moves(lab: Lab) -> Figure:
    """Without KV handoff, and with slow pulls of weights; all against the base."""
    base = _ours(lab, lab.trials())
    handoff = [
        _line(
            f"KV handoff {word}",
            [
                percent(
                    _ours(lab, lab.trials(f"costs.engine.prefill_tokens_per_s={rate}", key)), base
                )
                for rate in PREFILL_RATES
            ],
        )
        for word, key in (
            ("on", "costs.engine.has_kv_handoff=true"),
            ("off", "costs.engine.has_kv_handoff=false"),
        )
    ]
    pulls = [
        _line(
            words,
            [
                percent(_ours(lab, lab.trials(*PATIENT, f"costs.{key}={seconds}")), base)
                for seconds in PULLS_S
            ],
        )
        for words, key in (
            ("a joining satellite's pull", "switch.join_s"),
            ("a returning satellite's load", "switch.load_s"),
            ("each engine's load at a publication", "publication.load_s"),
        )
    ]
    return Figure(
        name="moves",
        panels=(
            Panel(
                x_label="tokens a node recomputes per second",
                y_label="% against the base",
                xs=tuple(f"{rate:,}" for rate in PREFILL_RATES),
                lines=tuple(handoff),
            ),
            Panel(
                x_label="seconds",
                y_label="% against the base",
                xs=tuple(str(seconds) for seconds in PULLS_S),
                lines=tuple(pulls),
            ),
        ),
    )


def supply(lab: Lab) -> Figure:
    """When there is enough to train on."""
    base = _ours(lab, lab.trials())

    def line(key: str, values: Sequence[float]) -> Line:
        found = [_ours(lab, lab.trials(f"schedule.{key}={value}")) for value in values]
        return _line("elastic", [percent(one, base) for one in found])

    return Figure(
        name="supply",
        panels=(
            Panel(
                x_label="supply_fraction",
                y_label="% against the base",
                xs=tuple(f"{value:g}" for value in SUPPLY_FRACTIONS),
                lines=(line("supply_fraction", SUPPLY_FRACTIONS),),
            ),
            Panel(
                x_label="supply_hold_s",
                y_label="% against the base",
                xs=tuple(str(value) for value in SUPPLY_HOLDS_S),
                lines=(line("supply_hold_s", SUPPLY_HOLDS_S),),
            ),
        ),
    )


def staleness(lab: Lab) -> Figure:
    """The target D: long bursts (mu = D, phi = 1) and single steps (mu = 1, phi = D); and a looser
    order at the base's mu and phi."""
    base = _ours(lab, lab.trials())
    long, single, static = [], [], []
    for target in TARGETS:
        trials = lab.trials(max_staleness=target)
        ran = lab.run(
            trials,
            [
                elastic(trials, shape=(target, 1)),
                elastic(trials, shape=(1, target)),
                *(split(trials, num, (1, target)) for num in (12, 16, 20)),
            ],
        )
        long.append(percent(ran[0], base))
        single.append(percent(ran[1], base))
        static.append(percent(max(ran[2:], key=lambda one: one.mean), base))
    loose = [lab.trials(max_staleness=bound) for bound in BOUNDS]
    return Figure(
        name="staleness",
        panels=(
            Panel(
                x_label="staleness target D, strict order",
                y_label="% against the base",
                xs=tuple(str(target) for target in TARGETS),
                lines=(
                    _line("elastic, mu = D, phi = 1", long),
                    _line("elastic, mu = 1, phi = D", single),
                    _line("best static split, mu = 1, phi = D", static),
                ),
            ),
            Panel(
                x_label="max_staleness",
                y_label="% against the base",
                xs=tuple(str(bound) for bound in BOUNDS),
                lines=tuple(
                    _line(
                        f"elastic, mu {steps}, phi {ahead}",
                        [
                            percent(lab.run(one, [elastic(one, shape=(steps, ahead))])[0], base)
                            for one in loose
                        ],
                    )
                    for steps, ahead in ((3, 1), (1, 3))
                ),
            ),
        ),
    )


def overdue(lab: Lab) -> tuple[Figure, dict[str, Bias]]:
    """`drop` against `wait`, and what it loses."""
    cases = {"as fitted": (), "a long tail": LONG_TAIL}
    points, biases = [], {}
    for name, sets in cases.items():
        waiting = _ours(lab, lab.trials(*sets))
        drop = (*sets, 'schedule.overdue="drop"')
        points.append(percent(_ours(lab, lab.trials(*drop)), waiting))
        shape = ("schedule.steps_per_burst=3", "schedule.run_ahead=1")
        biases[name] = bias_of_dropping(lab, lab.config(*drop, *shape))
    panel = Panel(
        x_label="workload",
        y_label="% of drop over wait",
        xs=tuple(cases),
        lines=(_line("elastic", points),),
    )
    return Figure(name="overdue", panels=(panel,)), biases


FIGURES: dict[str, Callable[[Lab], Figure]] = {
    "budget": budget,
    "cells": cells,
    "time_out": time_out,
    "training": training,
    "moves": moves,
    "supply": supply,
    "staleness": staleness,
}


def _ours(lab: Lab, trials: Trials) -> Tried:
    return lab.run(trials, [elastic(trials)])[0]


def _of_cells(lab: Lab, trials: Trials, num_cells: int) -> Tried:
    return _better(lab, trials, [elastic(trials, num_cells, shape) for shape in SHAPES])


def _better(lab: Lab, trials: Trials, layouts: Sequence[Layout]) -> Tried:
    return max(lab.run(trials, layouts), key=lambda one: one.mean)


def _line(label: str, points: Sequence[tuple[float, float]]) -> Line:
    return Line(label=label, points=tuple(points))


def _planned(trials: Trials) -> dict[str, Tried]:
    return {one.layout.policy: one for one in plan(trials).best}
