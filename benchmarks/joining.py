"""How soon a satellite that may join a step has its first micro-step, read from runs.

Run: `python benchmarks/joining.py RUN...`, each a run folder of `gyre train`. For every join: from
the command to the verified snapshot, to the admission, and to the claim of its first micro-step.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opengyre.control.commands import Admit
from opengyre.control.facts import MemberAdmitted
from opengyre.store.journal import read_journal
from opengyre.store.observations import MemberJoined, MicroStepDone
from opengyre.store.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", type=Path)
    print("| run | joins | pull | admitted | first claim |")
    print("|---|---|---|---|---|")
    for path in parser.parse_args().runs:
        joins = list(joins_of(path))
        if not joins:
            print(f"| {path.name} | 0 | | | |")
            continue
        pulls, admitted, claimed = zip(*joins, strict=True)
        medians = [f"{1000 * statistics.median(one):.0f} ms" for one in (pulls, admitted, claimed)]
        print(f"| {path.name} | {len(joins)} | {' | '.join(medians)} |")


Join = tuple[int, int]
"""A step and a cell."""


def joins_of(path: Path) -> Iterator[tuple[float, float, float]]:
    """Seconds from the command to join: of the pull, to the admission, to the first claim. A claim
    is where its cell began the work; joins that got no micro-step are left out."""
    asked_s: dict[Join, float] = {}
    admitted_s: dict[Join, float] = {}
    pull_s: dict[Join, float] = {}
    for row in read_journal(RunFolder(path).db):
        one = row.value
        asked_s |= dict.fromkeys(joins_asked(one), row.now_s)
        if isinstance(one, MemberAdmitted):
            admitted_s[one.step, one.cell] = row.now_s
        elif isinstance(one, MemberJoined):
            pull_s[one.step, one.cell] = one.pull_s
        elif isinstance(one, MicroStepDone) and (join := (one.step, one.cell)) in pull_s:
            began_s = asked_s[join]
            yield pull_s.pop(join), admitted_s[join] - began_s, row.now_s - one.run_s - began_s


def joins_asked(value: Any) -> list[Join]:
    """Of the commands of a plan."""
    commands = getattr(value, "commands", ())
    return [(one.step, one.cell) for one in commands if isinstance(one, Admit)]


if __name__ == "__main__":
    main()
