"""Which pairs of program and fault run always, and which only in `make test-full`."""

import os
import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import pytest

PROGRAMS = ("claude-code", "codex", "qwen-code", "mini-swe-agent")
SEED_VARIABLE = "GYRE_HARNESS_SEED"
SEED = os.environ.get(SEED_VARIABLE) or str(random.SystemRandom().randrange(1_000_000))

Pair = tuple[Any, str]


def pairs(
    faults: Sequence[StrEnum], *, num_each: int, costly: frozenset[Pair] = frozenset()
) -> list[Any]:
    """All pairs as parameters. The seed draws `num_each` programs for each fault, every program at
    least once, none that is costly unless all others are; the rest is marked slow."""
    rng = random.Random(f"{SEED}/{faults[0]}")
    drawn: set[Pair] = set()
    while {program for _, program in drawn} != set(PROGRAMS):
        drawn = _draw(faults, rng, num_each=num_each, costly=costly)
    return [
        pytest.param(
            *pair,
            id=f"{pair[0]}-{pair[1]}".replace(" ", "-"),
            marks=() if pair in drawn else pytest.mark.slow,
        )
        for pair in ((fault, program) for fault in faults for program in PROGRAMS)
    ]


def _draw(
    faults: Sequence[StrEnum], rng: random.Random, *, num_each: int, costly: frozenset[Pair]
) -> set[Pair]:
    drawn: set[Pair] = set()
    for fault in faults:
        cheap = [program for program in PROGRAMS if (fault, program) not in costly]
        chosen = rng.sample(cheap, min(num_each, len(cheap)))
        drawn |= {(fault, program) for program in chosen}
    return drawn
