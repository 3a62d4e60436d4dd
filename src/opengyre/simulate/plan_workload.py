"""The workload of a plan, changed in one respect.

Owns: executions that take longer, or pile up at a time-out; the weight of training. Must not know:
layouts. Invariant: the draws stay those of the seed; only what happens to them changes.
"""

from dataclasses import replace
from statistics import fmean

from opengyre.config.simulation import SimulationConfig
from opengyre.control.errors import InvariantError
from opengyre.simulate.workload import (
    Draw,
    EmpiricalWorkload,
    Endings,
    LognormalWorkload,
    Workload,
)

NUM_SAMPLES = 4_000
SAMPLE_SEED = 1
GROUP_SIZE = 8


def lengthened(workload: Workload, factor: float) -> Workload:
    """Executions that need `factor` times as long; time-outs stay where they are."""
    if factor == 1.0:
        return workload
    if isinstance(workload, LognormalWorkload):
        return replace(workload, mean_s=workload.mean_s * factor)
    known = _empirical(workload)
    groups = tuple(
        tuple(replace(one, duration_s=one.duration_s * factor) for one in group)
        for group in known.groups
    )
    return replace(known, groups=groups)


def piled(workload: Workload, share: float) -> Workload:
    """`share` of the executions end at the harness's time-out, and are graded; no other cap."""
    free = uncapped(workload)
    if share <= 0:
        return free
    lengths = sorted(durations(free))
    cap_s = lengths[min(len(lengths) - 1, round((1.0 - share) * len(lengths)))]
    return _with_endings(free, replace(_endings(free), harness_cap_s=cap_s))


def uncapped(workload: Workload) -> Workload:
    endings = replace(_endings(workload), harness_cap_s=None, overall_cap_s=None)
    return _with_endings(workload, endings)


def durations(workload: Workload) -> list[float]:
    """Seconds of a fixed sample of executions, caps applied."""
    return [one.duration_s for one in _sample(workload)]


def training_share(config: SimulationConfig, workload: Workload) -> float:
    """Of the device-seconds that one group needs: G / (G + N E[duration] / slots_per_device)."""
    training_s = config.costs.training.group_device_s
    return training_s / (training_s + _rollout_device_s(config, workload))


def at_share(config: SimulationConfig, workload: Workload, share: float) -> SimulationConfig:
    """The scenario with training as dear as makes its share of the device-seconds `share`."""
    group_s = _rollout_device_s(config, workload) * share / (1.0 - share)
    training = config.costs.training.model_copy(update={"group_device_s": group_s})
    costs = config.costs.model_copy(update={"training": training})
    return config.model_copy(update={"costs": costs})


def capped_share(workload: Workload) -> float:
    """Share of that sample that a time-out ends."""
    return fmean(one.is_capped for one in _sample(workload))


def _sample(workload: Workload) -> list[Draw]:
    return [
        workload.draw(SAMPLE_SEED, number // GROUP_SIZE, number % GROUP_SIZE)
        for number in range(NUM_SAMPLES)
    ]


def _rollout_device_s(config: SimulationConfig, workload: Workload) -> float:
    """Device-seconds that a group takes of full engines."""
    num, slots = config.schedule.group_size, config.topology.slots_per_device
    return num * fmean(durations(workload)) / slots


def _endings(workload: Workload) -> Endings:
    if isinstance(workload, LognormalWorkload):
        return workload.endings
    return _empirical(workload).endings


def _with_endings(workload: Workload, endings: Endings) -> Workload:
    if isinstance(workload, LognormalWorkload):
        return replace(workload, endings=endings)
    return replace(_empirical(workload), endings=endings)


def _empirical(workload: Workload) -> EmpiricalWorkload:
    if isinstance(workload, EmpiricalWorkload):
        return workload
    raise InvariantError(f"plan: no rule to change a {type(workload).__name__}")
