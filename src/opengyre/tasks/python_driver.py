"""What a Python grader runs in the sandbox: pytest over the task's tests, or one function.

Standard library only: the interpreter gets this file's text by `-c` and a JSON order as argument.
Owns the verdict's arithmetic. Invariants: the answer is the one line on the descriptor that was
stdout; code under test runs in a child that does not hold it; what a child told before it crashed
counts; a failure that is not the tests' is an answer without a reward.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

MAX_REASON_CHARS = 400
MAX_STREAM_BYTES = 64 << 20
PYTEST_FAILED = (3, 4)
PHASES = 3


class NoVerdictError(Exception):
    """Nothing was found out about the code under test."""


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    answer = _open_answer()
    sys.dont_write_bytecode = True

    def tell_failure(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> NoReturn:
        """Of whatever was raised and not caught, also by the function."""
        place = traceback.extract_tb(trace)[-1]
        where = "" if kind is NoVerdictError else f" (line {place.lineno} of {place.filename})"
        name = "" if kind is NoVerdictError else f"{kind.__name__}: "
        _tell(answer, None, f"{name}{error}{where}")

    sys.excepthook = tell_failure
    refuse_other_version(order["version"])
    if order["function"]:
        reward, reason = call_function(order)
    else:
        reward, reason = run_tests(order)
    _tell(answer, reward, reason)


def refuse_other_version(version: list[int]) -> None:
    """Packages with compiled parts would fail here, and so would the tests that need them."""
    if list(sys.version_info[:2]) != version:
        wanted, here = ".".join(map(str, version)), ".".join(map(str, sys.version_info[:2]))
        raise NoVerdictError(f"the sandbox starts Python {here}, the packages are for {wanted}")


def _open_answer() -> int:
    """A descriptor of the present stdout that no program we start inherits; 1 and 2 are closed."""
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in (1, 2):
        os.dup2(nothing, target)
    return answer


def _tell(answer: int, reward: float | None, reason: str) -> NoReturn:
    """One line, then the end, whatever threads are left."""
    line = json.dumps({"reward": reward, "reason": reason[:MAX_REASON_CHARS]})
    os.write(answer, f"\n{line}\n".encode())
    os._exit(0)


def call_function(order: dict[str, Any]) -> tuple[float, str]:
    """What the function returned. The workspace is not importable: it is an argument."""
    place, _, name = order["function"].rpartition(":")
    sys.path += order["package_paths"]
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(place))
        module = _load_file(place)
    else:
        module = importlib.import_module(place)
    found: Callable[[Path, Path], object] = getattr(module, name)
    reward = found(Path(order["workspace"]), Path(order["tests"]))
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise NoVerdictError(f"{name} returned {str(reward)[:40]!r}, expected a number")
    return float(reward), f"by {name}"


def _load_file(place: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise NoVerdictError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(place).stem] = module
    spec.loader.exec_module(module)
    return module


def run_tests(order: dict[str, Any]) -> tuple[float, str]:
    """The share of collected tests that passed, each test file in a process of its own."""
    standard = list(sys.path)
    sys.path += order["package_paths"]
    try:
        importlib.import_module("pytest")
    except ImportError as error:
        raise NoVerdictError(f"pytest cannot be imported: {error}") from error
    sys.path[:] = [*standard, order["workspace"], *order["package_paths"]]
    tests = Path(order["tests"])
    num_passed = num_collected = 0
    for path in sorted({*tests.rglob("test_*.py"), *tests.rglob("*_test.py")}):
        passed, collected = _run_file(path, tests)
        num_passed += passed
        num_collected += collected
    if not num_collected:
        raise NoVerdictError("no tests were collected from test_*.py and *_test.py")
    return num_passed / num_collected, f"{num_passed} of {num_collected} tests passed"


def _run_file(path: Path, tests: Path) -> tuple[int, int]:
    """(passed, collected) of one file; one that breaks or ends while it is collected counts with
    the tests that stand in its text."""
    stream = os.memfd_create("results")
    child = os.fork()
    if child == 0:
        _become_tests(path, tests, stream)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    name = path.relative_to(tests)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        raise NoVerdictError(f"the tests of {name} were killed")
    told = list(_read_stream(stream))
    os.close(stream)
    has_left = ["left"] in told
    for kind, *rest in told:
        if kind == "ended" and rest[0] in PYTEST_FAILED and not has_left:
            raise NoVerdictError(f"pytest failed at {name}: {rest[1]}")
    return count(told, num_in_text=count_in_text(path.read_bytes()))


def _become_tests(path: Path, tests: Path, stream: int) -> NoReturn:
    """In the child: pytest, with no settings, plugins or conftest.py but those of the tests."""
    os.setsid()
    os.closerange(3, stream)
    os.closerange(stream + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.excepthook = sys.__excepthook__
    sys.stderr = words = io.StringIO()
    settings = tests / "pytest.ini"
    flags = ["-c", str(settings) if settings.is_file() else os.devnull]
    flags += [f"--rootdir={tests}", f"--confcutdir={tests}"]
    flags += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    plugin = Stream(stream)
    try:
        code = int(importlib.import_module("pytest").main([str(path), *flags], plugins=[plugin]))
    except SystemExit as error:
        code = PYTEST_FAILED[0]
        words.write(f" tests/conftest.py left the interpreter: {error}")
        plugin.tell_leaving(error)
    plugin.tell("ended", code, " ".join(words.getvalue().split())[-MAX_REASON_CHARS // 2 :])
    os._exit(0)


class Stream:
    """A pytest plugin: every fact is written at once, so that it outlives a crash."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._is_code_running = False

    def tell(self, *words: object) -> None:
        os.write(self._handle, json.dumps(words).encode() + b"\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.tell("broken", report.nodeid)

    def tell_leaving(self, error: BaseException) -> None:
        """Before the collection only conftest.py runs, later code under test may be what left."""
        if self._is_code_running and isinstance(error, SystemExit | KeyboardInterrupt):
            self.tell("left")

    def pytest_collection(self) -> None:
        self._is_code_running = True

    def pytest_internalerror(self, excinfo: Any) -> None:
        self.tell_leaving(excinfo.value)

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """Nobody has a keyboard; what calls pytest.exit() comes here too and has not left."""
        self.tell_leaving(excinfo.value)

    def pytest_collection_finish(self, session: Any) -> None:
        self.tell("collected", [item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tell("ran", report.nodeid, report.outcome)


def _read_stream(handle: int) -> Iterator[list[Any]]:
    """What the child told; read by position, for a process it left may still write."""
    body = os.pread(handle, MAX_STREAM_BYTES + 1, 0)
    if len(body) > MAX_STREAM_BYTES:
        raise NoVerdictError(f"the tests told more than {MAX_STREAM_BYTES} bytes")
    for line in body.splitlines():
        yield json.loads(line)


def count(told: list[list[Any]], *, num_in_text: int) -> tuple[int, int]:
    """(passed, collected). A test passed if set-up, call and tear-down did, and nothing of it
    failed or was skipped."""
    collected: list[str] | None = None
    is_broken = False
    outcomes: dict[str, list[str]] = {}
    for kind, *rest in told:
        if kind == "collected":
            collected = rest[0]
        elif kind in ("broken", "left"):
            is_broken = True
        elif kind == "ran":
            outcomes.setdefault(rest[0], []).append(rest[1])
    passed = [
        name
        for name in set(collected or ())
        if len(outcomes.get(name, ())) >= PHASES and set(outcomes[name]) == {"passed"}
    ]
    num_collected = len(collected or ())
    if is_broken or collected is None:
        num_collected = max(num_collected, num_in_text, 1)
    return len(passed), num_collected


def count_in_text(source: bytes) -> int:
    """Test functions and methods by their names. Raises SyntaxError."""
    nodes = ast.parse(source).body
    classes = [one for one in nodes if isinstance(one, ast.ClassDef) and one.name[:4] == "Test"]
    nodes += [one for found in classes for one in found.body]
    functions = [one for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(one.name.startswith("test") for one in functions)


if __name__ == "__main__":
    main()
