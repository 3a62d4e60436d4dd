"""How told results become a share: what is counted, and what has passed."""

import sys

import pytest

from opengyre.tasks.python_driver import (
    NoVerdictError,
    count,
    count_in_text,
    refuse_other_version,
)

ALL_PASSED = [["ran", "a", "passed"]] * 3
SOURCE = b"""
import os
def helper(): pass
def test_one(): pass
async def test_two(): pass
class TestMany:
    def test_three(self): pass
    def setup_method(self): pass
class Other:
    def test_not_collected(self): pass
"""


def ran(name: str, *outcomes: str) -> list[list[str]]:
    return [["ran", name, outcome] for outcome in outcomes]


@pytest.mark.parametrize(
    "outcomes",
    [
        ("failed", "passed"),
        ("passed", "failed", "passed"),
        ("passed", "passed", "failed"),
        ("skipped", "passed"),
        ("passed", "skipped", "passed"),
        ("passed", "passed"),
        ("passed", "passed", "failed", "passed"),
        (),
    ],
)
def test_a_test_passes_only_if_set_up_call_and_tear_down_did(outcomes: tuple[str, ...]) -> None:
    told = [["collected", ["a", "b"]], *ALL_PASSED, *ran("b", *outcomes)]
    assert count(told, num_in_text=2) == (1, 2)


def test_what_was_never_collected_does_not_count() -> None:
    told = [["collected", ["b"]], *ALL_PASSED, *ran("b", "failed", "passed")]
    assert count(told, num_in_text=5) == (0, 1)


def test_a_file_that_breaks_counts_with_the_tests_in_its_text_and_with_one_at_least() -> None:
    broken = [["broken", "test_x.py"], ["collected", []]]
    assert count(broken, num_in_text=4) == (0, 4)
    assert count(broken, num_in_text=0) == (0, 1)
    assert count([], num_in_text=0) == (0, 1)
    partly = [["broken", "test_x.py::TestB"], ["collected", ["a"]], *ALL_PASSED]
    assert count(partly, num_in_text=3) == (1, 3)


def test_parameters_count_one_by_one_and_no_tests_are_none() -> None:
    assert count([["collected", ["a[1]", "a[2]", "a[3]"]]], num_in_text=1) == (0, 3)
    assert count([["collected", []]], num_in_text=0) == (0, 0)


def test_tests_are_counted_by_name_without_running_them() -> None:
    assert count_in_text(SOURCE) == 3


def test_packages_of_another_python_are_refused_instead_of_failing_tests() -> None:
    refuse_other_version(list(sys.version_info[:2]))
    with pytest.raises(NoVerdictError, match=r"the packages are for 2\.7"):
        refuse_other_version([2, 7])
