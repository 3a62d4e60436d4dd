"""The discrete-event kernel: order, cancelling, bounds."""

import pytest

from opengyre.control.errors import InvariantError
from opengyre.simulate.kernel import Kernel


def drain(kernel: Kernel) -> None:
    while kernel.next_s is not None:
        kernel.run_next()


def test_actions_run_in_time_order_and_at_one_moment_in_the_order_they_were_set() -> None:
    kernel, seen = Kernel(), []
    for name, time_s in (("d", 2.0), ("a", 1.0), ("b", 1.0), ("c", 1.0)):
        kernel.at(time_s, lambda name=name: seen.append((name, kernel.now_s)))
    drain(kernel)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 2.0)]


def test_an_action_may_set_another_at_the_same_moment() -> None:
    kernel, seen = Kernel(), []
    kernel.after(1.0, lambda: kernel.after(0.0, lambda: seen.append(kernel.now_s)))
    drain(kernel)
    assert seen == [1.0]


def test_a_cancelled_action_does_not_run_and_a_second_cancel_does_nothing() -> None:
    kernel, seen = Kernel(), []
    token = kernel.at(1.0, lambda: seen.append("cancelled"))
    kernel.at(2.0, lambda: seen.append("kept"))
    kernel.cancel(token)
    kernel.cancel(token)
    assert kernel.next_s == 2.0
    drain(kernel)
    assert seen == ["kept"]


def test_cancelled_actions_do_not_pile_up() -> None:
    kernel = Kernel()
    for _ in range(10_000):
        kernel.cancel(kernel.at(1.0, lambda: None))
    assert len(kernel._heap) < 200


def test_time_does_not_go_back_nor_past_an_action() -> None:
    kernel = Kernel()
    kernel.at(5.0, lambda: None)
    kernel.pass_to(4.0)
    for time_s in (3.0, 6.0):
        with pytest.raises(InvariantError):
            kernel.pass_to(time_s)
    with pytest.raises(InvariantError):
        kernel.at(3.0, lambda: None)
    with pytest.raises(InvariantError):
        kernel.at(float("nan"), lambda: None)


def test_the_number_of_pending_actions_is_bounded() -> None:
    kernel = Kernel(max_pending=2)
    kernel.at(1.0, lambda: None)
    kernel.at(1.0, lambda: None)
    with pytest.raises(InvariantError, match="more than 2"):
        kernel.at(1.0, lambda: None)


def test_nothing_runs_when_nothing_is_set() -> None:
    with pytest.raises(InvariantError):
        Kernel().run_next()
