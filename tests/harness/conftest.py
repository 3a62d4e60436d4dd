"""Says by which seed the pairs of program and fault were drawn."""

import pytest
from drawn_pairs import SEED, SEED_VARIABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"pairs of program and fault were drawn by {SEED_VARIABLE}={SEED}")
