"""What of an answer's calls is counted, whatever family wrote them."""

import re
import time

import pytest

from opengyre.config.watched import WATCHED_PATTERN
from opengyre.gateway.call_counts import (
    MAX_SEARCHED_CHARS,
    BegunCall,
    CallCounts,
    count_calls,
    watched_regex,
)
from opengyre.gateway.request import Call

WATCHED = watched_regex(WATCHED_PATTERN)


def begun(arguments: str, *, is_closed: bool = True) -> BegunCall:
    return BegunCall(call=Call(call_id="c", name="bash", arguments=arguments), is_closed=is_closed)


def counts(*all_begun: BegunCall, is_cut: bool = False) -> tuple[int, int, int]:
    found = count_calls(all_begun, is_cut=is_cut, watched=WATCHED)
    return found.num_read, found.num_malformed, found.num_watched


@pytest.mark.parametrize("arguments", ["", "{", '{"a": }', "[]", '"x"', "null", "[" * 100_000])
def test_arguments_that_are_no_json_object_are_malformed(arguments: str) -> None:
    assert counts(begun(arguments)) == (0, 1, 0)
    assert counts(begun(arguments, is_closed=False), is_cut=True) == (0, 0, 0)
    assert counts(begun(arguments, is_closed=True), is_cut=True) == (0, 1, 0)


def test_each_begun_call_counts_once() -> None:
    nameless = BegunCall(call=None, is_closed=False)
    mine = [begun("{}"), begun('{"path": "tests/a.py"}'), begun("{"), nameless]
    assert counts(*mine) == (2, 2, 1)
    assert counts(*mine, is_cut=True) == (2, 1, 1)
    assert counts() == (0, 0, 0)


@pytest.mark.parametrize(
    "command",
    [
        "cat tests/test_a.py",
        "sed -i s/a/b/ src/pkg/test/data.json",
        "cd x\\ntest_core.py",
        "rm conftest.py",
        "vi pkg/server_test.go",
        "echo > src/app.test.tsx",
        "bash /tests/test.sh",
        "cat run_tests.sh",
        "ls __tests__/a.js",
    ],
)
def test_what_names_a_test_file_is_watched(command: str) -> None:
    assert counts(begun(f'{{"command": "{command}"}}')) == (1, 0, 1)


@pytest.mark.parametrize(
    "command",
    ["ls latest/", "echo all tests pass", "cat contest.py", "./testing/run", "[ -f x ] && test y"],
)
def test_what_names_no_test_file_is_not_watched(command: str) -> None:
    assert counts(begun(f'{{"command": "{command}"}}')) == (1, 0, 0)


def test_malformed_calls_are_not_watched() -> None:
    assert counts(begun('{"path": "tests/')) == (0, 1, 0)


def test_only_the_beginning_of_long_arguments_is_searched_and_fast() -> None:
    filler = "test_" * (MAX_SEARCHED_CHARS // 4)
    began_s = time.perf_counter()
    assert counts(begun(f'{{"a": "{filler}", "path": "tests/a"}}')) == (1, 0, 0)
    assert time.perf_counter() - began_s < 1
    assert counts(begun(f'{{"path": "tests/a", "a": "{filler}"}}')) == (1, 0, 1)


def test_no_pattern_watches_nothing() -> None:
    assert watched_regex("") is None
    found = count_calls([begun('{"a": "tests/"}')], is_cut=False, watched=None)
    assert found == CallCounts(num_read=1, num_malformed=0, num_watched=0)
    assert isinstance(WATCHED, re.Pattern)
