"""Processes of engines: lines, deaths, new incarnations."""

from opengyre.control.facts import EngineLost, EngineReady, Fact
from opengyre.control.ids import EngineId
from opengyre.simulate.kernel import Kernel
from opengyre.simulate.processes import Processes

ENGINE, OTHER = EngineId("c0"), EngineId("c1")


def make_processes() -> tuple[Processes, Kernel, list[Fact]]:
    kernel, told = Kernel(), []
    processes = Processes(
        (ENGINE, OTHER), kernel=kernel, tell=told.append, version_of=lambda engine: 7
    )
    processes.start(ENGINE)
    processes.start(OTHER)
    return processes, kernel, told


def run_all(kernel: Kernel) -> None:
    while kernel.next_s is not None:
        kernel.run_next()


def test_what_one_engine_was_told_ends_in_its_order_and_others_do_not_wait() -> None:
    processes, kernel, _ = make_processes()
    seen: list[tuple[str, float]] = []
    processes.in_line(ENGINE, 10.0, lambda: seen.append(("long", kernel.now_s)))
    processes.in_line(ENGINE, 0.0, lambda: seen.append(("next", kernel.now_s)))
    processes.in_line(ENGINE, 1.0, lambda: seen.append(("last", kernel.now_s)))
    processes.in_line(OTHER, 1.0, lambda: seen.append(("other", kernel.now_s)))
    run_all(kernel)
    assert seen == [("other", 1.0), ("long", 10.0), ("next", 10.0), ("last", 11.0)]


def test_what_costs_nothing_is_done_at_once() -> None:
    processes, kernel, _ = make_processes()
    seen: list[float] = []
    processes.in_line(ENGINE, 0.0, lambda: seen.append(kernel.now_s))
    assert seen == [0.0]


def test_a_dead_process_keeps_no_promise_and_its_successor_neither() -> None:
    processes, kernel, told = make_processes()
    seen: list[str] = []
    processes.in_line(ENGINE, 10.0, lambda: seen.append("of the dead"))
    kernel.after(1.0, lambda: processes.kill(ENGINE, "test"))
    kernel.after(2.0, lambda: processes.start(ENGINE))
    kernel.after(3.0, lambda: processes.in_line(ENGINE, 1.0, lambda: seen.append("of the living")))
    run_all(kernel)
    assert seen == ["of the living"]
    assert kernel.now_s == 10.0
    assert told[2:] == [
        EngineLost(engine=ENGINE, incarnation=1, reason="test"),
        EngineReady(engine=ENGINE, incarnation=2, version=7),
    ]


def test_alive_means_started_and_not_killed() -> None:
    processes, _, _ = make_processes()
    assert processes.is_alive(ENGINE)
    processes.kill(ENGINE, "test")
    assert not processes.is_alive(ENGINE)
    assert processes.is_alive(OTHER)
