"""Executions on one engine: the virtual clock, the load curve, stalls, recompute, KV."""

import pytest

from opengyre.control.errors import InvariantError
from opengyre.control.ids import EngineId, ExecutionId
from opengyre.simulate.costs import EngineCosts, ToolCosts
from opengyre.simulate.rollout import RolloutEngine, Work
from opengyre.simulate.workload import Draw


def make_engine(
    *, slots: int = 4, share: float = 0.0, devices: int = 1, **costs: float
) -> RolloutEngine:
    return RolloutEngine(
        engine=EngineId("c0"),
        devices=devices,
        slots=slots,
        costs=EngineCosts(**costs),
        tools=ToolCosts(share=share),
    )


def make_work(number: int, duration_s: float) -> Work:
    draw = Draw(duration_s=duration_s, is_capped=False, has_verdict=True)
    return Work(
        execution=ExecutionId(f"e{number:06d}"),
        number=number,
        draw=draw,
        group=0,
        owed_s=duration_s,
        left_s=duration_s,
    )


def end_of(engine: RolloutEngine) -> tuple[float, int]:
    following = engine.next_finish()
    assert following is not None
    return following[0], following[1].number


def test_with_a_flat_curve_an_execution_ends_after_its_duration_whatever_the_load() -> None:
    engine = make_engine()
    engine.add(make_work(1, 100.0), 0.0)
    engine.add(make_work(2, 20.0), 50.0)
    assert end_of(engine) == (70.0, 2)
    engine.remove(next(w for w in engine.live.values() if w.number == 2), 60.0)
    assert end_of(engine) == (100.0, 1)


def test_with_a_load_curve_an_execution_is_faster_alone_and_at_its_own_speed_on_a_full_engine() -> (
    None
):
    engine = make_engine(slots=2, load_slope=1.0)
    first, second = make_work(1, 100.0), make_work(2, 100.0)
    engine.add(first, 0.0)
    alone = 2.0 / 1.5
    assert end_of(engine)[0] == pytest.approx(100.0 / alone)
    engine.add(second, 30.0)
    assert end_of(engine)[0] == pytest.approx(30.0 + (100.0 - 30.0 * alone))
    engine.remove(first, 60.0)
    assert first.left_s == pytest.approx(100.0 - 30.0 * alone - 30.0)
    assert end_of(engine)[0] == pytest.approx(60.0 + 70.0 / alone)
    assert engine.progress_s == pytest.approx(30.0 * alone + 2 * 30.0)


def test_time_in_tool_calls_feels_no_load() -> None:
    busy = make_engine(slots=2, share=0.5, load_slope=1.0)
    busy.add(make_work(1, 100.0), 0.0)
    assert end_of(busy)[0] == pytest.approx(100.0 * (0.5 + 0.5 / (2.0 / 1.5)))


def test_a_stall_makes_the_end_later_and_only_that_one() -> None:
    engine = make_engine()
    first, second = make_work(1, 100.0), make_work(2, 110.0)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    engine.settle(10.0)
    engine.stall(first, 25.0)
    assert end_of(engine) == (110.0, 2)
    assert first.owed_s == 125.0
    engine.remove(second, 20.0)
    assert end_of(engine) == (125.0, 1)


def test_work_goes_on_elsewhere_from_where_it_was() -> None:
    source, destination = make_engine(), make_engine()
    work = make_work(1, 100.0)
    for engine in (source, destination):
        engine.add(make_work(2, 500.0), 0.0)
    source.add(work, 0.0)
    source.remove(work, 40.0)
    assert work.left_s == pytest.approx(60.0)
    destination.add(work, 70.0)
    assert end_of(destination) == (130.0, 1)
    assert end_of(source) == (500.0, 2)


def test_recompute_and_kv_reads_of_one_engine_wait_for_each_other() -> None:
    engine = make_engine(prefill_tokens_per_s=10.0, kv_move_tokens_per_s=100.0)
    assert engine.prefill(50.0, 1.0) == pytest.approx(6.0)
    assert engine.prefill(50.0, 1.0) == pytest.approx(11.0)
    assert engine.prefill(50.0, 20.0) == pytest.approx(25.0)
    assert engine.read_kv(50.0, 1.0) == pytest.approx(1.5)
    assert engine.read_kv(50.0, 1.0) == pytest.approx(2.0)
    larger = make_engine(devices=5, prefill_tokens_per_s=10.0, kv_move_tokens_per_s=100.0)
    assert larger.prefill(50.0, 1.0) == pytest.approx(2.0)
    assert larger.read_kv(50.0, 1.0) == pytest.approx(1.1)


def test_old_entries_of_the_heap_do_not_pile_up() -> None:
    engine = make_engine()
    work = make_work(1, 100.0)
    engine.add(work, 0.0)
    for _ in range(5_000):
        engine.stall(work, 1.0)
    assert len(engine.heap) < 200
    assert end_of(engine)[0] == pytest.approx(5_100.0)


def test_tokens_grow_with_work_up_to_the_window() -> None:
    tools = ToolCosts(start_tokens=100, tokens_per_s=10.0, max_tokens=1_000)
    assert tools.tokens(0.0, 0.9) == 100
    assert tools.tokens(20.0, 0.5) == 300
    assert tools.tokens(20.0, 0.25) == 200
    assert tools.tokens(1e6, 0.5) == 1_000


def test_costs_out_of_bounds_are_refused() -> None:
    for numbers in ({"load_slope": -0.1}, {"prefill_tokens_per_s": 0.0}, {"freeze_s": -1.0}):
        with pytest.raises(InvariantError):
            EngineCosts(**numbers)
    with pytest.raises(InvariantError):
        ToolCosts(share=1.5)
