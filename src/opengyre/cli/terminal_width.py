"""Tables that fit the terminal.

Owns: how wide the terminal is, and which columns stand side by side. Must not know: what they say.
Invariant: what goes to a file or a pipe is never split.
"""

import shutil
from collections.abc import Sequence

UNBOUNDED = 100_000
GAP = 2


def terminal_columns() -> int:
    """Of the terminal on stdout, or what COLUMNS says; UNBOUNDED for a file or a pipe."""
    return shutil.get_terminal_size((UNBOUNDED, 24)).columns


def fitting(rows: Sequence[dict[str, str]], num_columns: int) -> list[list[dict[str, str]]]:
    """`rows` as blocks of rows: each repeats the first column and has as many others as fit, at
    least one. All rows have the same columns."""
    if not rows:
        return []
    first, *names = rows[0]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in (first, *names)}
    blocks: list[list[str]] = []
    room = 0
    for name in names:
        if not blocks or room < widths[name] + GAP:
            blocks.append([])
            room = num_columns - widths[first]
        blocks[-1].append(name)
        room -= widths[name] + GAP
    return [[{one: row[one] for one in (first, *block)} for row in rows] for block in blocks]
