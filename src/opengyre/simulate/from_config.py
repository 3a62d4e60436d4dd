"""From a scenario file's values to what the simulator takes.

Owns: the conversion, field by field. Must not know: TOML, defaults, bounds (the config has them).
Invariant: every key of a scenario file reaches a Scenario here, or says how often it is run.
"""

from pathlib import Path

from opengyre.config.simulation import (
    SimulatedCosts,
    SimulatedTopology,
    SimulatedWorkload,
    SimulationConfig,
)
from opengyre.control.config import EngineSpec, Overdue, PolicyName, SchedulerConfig
from opengyre.control.ids import EngineId, cell_engine_id, standalone_engine_id
from opengyre.seams.errors import ConfigError
from opengyre.simulate import costs
from opengyre.simulate.scenario import Failure, Scenario
from opengyre.simulate.workload import (
    EmpiricalWorkload,
    Endings,
    LognormalWorkload,
    Recorded,
    Workload,
    read_csv,
)


def scenario_of(config: SimulationConfig, workload: Workload | None = None) -> Scenario:
    """`workload` replaces that of the file (a recorded run's). Raises ConfigError for a bad CSV."""
    topology = config.topology
    return Scenario(
        name=config.scenario.name,
        scheduler=scheduler_of(config),
        devices_per_cell=topology.devices_per_cell,
        devices_per_standalone=topology.devices_per_standalone,
        costs=costs_of(config.costs),
        workload=workload or workload_of(config.workload),
        stop_after_step=config.scenario.stop_after_step,
        failures=tuple(
            Failure(
                at_s=one.at_s,
                engine=EngineId(one.engine),
                restart_after_s=one.restart_after_s,
            )
            for one in config.failures
        ),
    )


def scheduler_of(config: SimulationConfig) -> SchedulerConfig:
    schedule = config.schedule
    return SchedulerConfig(
        num_cells=config.topology.num_cells,
        engines=engines_of(config.topology),
        num_steps=config.scenario.num_steps,
        policy=PolicyName(schedule.policy),
        is_streaming=schedule.streaming,
        num_training_cells=schedule.num_training_cells,
        group_size=schedule.group_size,
        groups_per_step=schedule.groups_per_step,
        steps_per_burst=schedule.steps_per_burst,
        run_ahead=schedule.run_ahead,
        oversample=schedule.oversample,
        filter_zero_variance=schedule.filter_zero_variance,
        supply_fraction=schedule.supply_fraction,
        supply_hold_s=schedule.supply_hold_s,
        min_valid_members=schedule.min_valid_members,
        max_staleness=schedule.max_staleness,
        overdue=Overdue(schedule.overdue),
        recall_after_s=schedule.recall_after_s,
        join_deadline_s=schedule.join_deadline_s,
        publish_timeout_s=schedule.publish_timeout_s,
    )


def engines_of(topology: SimulatedTopology) -> tuple[EngineSpec, ...]:
    """Cells first. An engine has slots_per_device x devices slots, rounded, at least one."""
    in_cell = max(1, round(topology.slots_per_device * topology.devices_per_cell))
    alone = max(1, round(topology.slots_per_device * topology.devices_per_standalone))
    cells = [
        EngineSpec(engine=cell_engine_id(number), slots=in_cell, cell=number)
        for number in range(topology.num_cells)
    ]
    standalone = [
        EngineSpec(engine=standalone_engine_id(number), slots=alone, cell=None)
        for number in range(topology.num_standalone)
    ]
    return (*cells, *standalone)


def costs_of(section: SimulatedCosts) -> costs.Costs:
    """The config's models have the fields of the simulator's dataclasses."""
    return costs.Costs(
        training=costs.TrainingCosts(**section.training.model_dump()),
        engine=costs.EngineCosts(**section.engine.model_dump()),
        switch=costs.SwitchCosts(**section.switch.model_dump()),
        publication=costs.PublicationCosts(**section.publication.model_dump()),
        checkpoint=costs.CheckpointCosts(**section.checkpoint.model_dump()),
        grader=costs.GraderCosts(**section.grader.model_dump()),
        tools=costs.ToolCosts(**section.tools.model_dump()),
    )


def endings_of(section: SimulatedWorkload) -> Endings:
    return Endings(
        harness_cap_s=section.harness_cap_s,
        overall_cap_s=section.overall_cap_s,
        is_overall_graded=section.is_overall_graded,
        no_verdict_rate=section.no_verdict_rate,
        void_rate=section.void_rate,
        zero_variance_share=section.zero_variance_share,
    )


def workload_of(section: SimulatedWorkload) -> Workload:
    """Raises ConfigError if the CSV file cannot be read."""
    if section.csv is not None:
        groups = _groups_of(section.csv)
        return EmpiricalWorkload(groups=groups, endings=endings_of(section))
    assert section.mean_s is not None
    return LognormalWorkload(
        mean_s=section.mean_s,
        sigma_between=section.sigma_between,
        sigma_within=section.sigma_within,
        endings=endings_of(section),
    )


def _groups_of(path: Path) -> tuple[tuple[Recorded, ...], ...]:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError("expected a file")
        return read_csv(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"workload.csv = {path}: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"workload.csv = {path}: cannot read it: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.csv = {path}: expected a CSV file in UTF-8") from error
