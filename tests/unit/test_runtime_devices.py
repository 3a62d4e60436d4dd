"""Where there are several devices, the processes of a run are spread over them."""

from opengyre.config.schedule import TopologyConfig
from opengyre.control.ids import cell_engine_id, standalone_engine_id
from opengyre.runtime.embedded import device_number
from opengyre.runtime.messages import CellSetup

TOPOLOGY = TopologyConfig(num_cells=3, stages_per_cell=2, num_standalone=2)


def _setup(engine: str, cell: int | None) -> CellSetup:
    return CellSetup(
        engine=engine,
        cell=cell,
        incarnation=2,
        slots=1,
        config_json="",
        link_address="",
        plane_dir="",
    )


def _numbers(num: int) -> list[int]:
    of_cells = [
        device_number(_setup(cell_engine_id(cell), cell), TOPOLOGY, stage=stage, num=num)
        for cell in range(3)
        for stage in range(2)
    ]
    alone = [
        device_number(_setup(standalone_engine_id(k), None), TOPOLOGY, stage=0, num=num)
        for k in range(2)
    ]
    return of_cells + alone


def test_each_process_has_a_device_of_its_own_where_there_are_enough() -> None:
    assert _numbers(8) == list(range(8))


def test_fewer_devices_are_shared_evenly() -> None:
    assert _numbers(4) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert _numbers(1) == [0] * 8
