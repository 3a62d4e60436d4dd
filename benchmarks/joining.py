"""How soon a satellite that may join a step has its first micro-step, read from runs.

Run: `python benchmarks/joining.py RUN...`, each a run folder of `gyre train`. For every join: from
the command to the verified snapshot, to the admission, and to the claim of its first micro-step.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

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


def joins_of(path: Path) -> Iterator[tuple[float, float, float]]:
    """Seconds from the command to join: of the pull, to the admission, to the first claim. A claim
    is where its cell began the work; joins that got no micro-step are left out."""
    asked_s: dict[tuple[int, int], float] = {}
    admitted_s: dict[tuple[int, int], float] = {}
    pull_s: dict[tuple[int, int], float] = {}
    for row in read_journal(RunFolder(path).db):
        match row.value:
            case MemberAdmitted(step=step, cell=cell):
                admitted_s[step, cell] = row.now_s
            case MemberJoined():
                pull_s[row.value.step, row.value.cell] = row.value.pull_s
            case MicroStepDone() if (row.value.step, row.value.cell) in asked_s:
                key = (row.value.step, row.value.cell)
                began_s = asked_s.pop(key)
                first_s = row.now_s - row.value.run_s - began_s
                if key in pull_s:
                    yield pull_s[key], admitted_s[key] - began_s, first_s
            case _:
                for command in getattr(row.value, "commands", ()):
                    if isinstance(command, Admit):
                        asked_s[command.step, command.cell] = row.now_s


if __name__ == "__main__":
    main()
