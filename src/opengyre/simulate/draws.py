"""Numbers drawn by key: the same key gives the same number, whatever was drawn before.

Owns: the mixing function. Must not know: what a number is for.
Invariants: no state; a key is (seed, what for, counters), so two policies that ask for the same
thing see the same number.
"""

from enum import IntEnum
from statistics import NormalDist

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Odd 64-bit numbers without structure: keys of small counters do not meet.
_SEED, _PURPOSE = 0xD1342543DE82EF95, 0xAF251AF3B0F025B5
_FIRST, _SECOND = 0x2545F4914F6CDD1D, 0xDA942042E4DD58B5
_STANDARD_NORMAL = NormalDist()


class Purpose(IntEnum):
    """What a number is drawn for: numbers of different purposes are independent."""

    GROUP_LENGTH = 1
    MEMBER_LENGTH = 2
    VERDICT = 3
    VOID = 4
    GRADER = 5
    PLACE_IN_TURN = 6
    TOKENS = 7
    TOOL_TIME = 8
    SAMPLE = 9
    VARIANCE = 10


def uniform(seed: int, purpose: Purpose, first: int, second: int = 0) -> float:
    """A number in the open interval (0, 1)."""
    key = seed * _SEED + purpose * _PURPOSE + first * _FIRST + second * _SECOND
    return ((_mixed(_mixed(key)) >> 11) + 0.5) * 2.0**-53


def normal(seed: int, purpose: Purpose, first: int, second: int = 0) -> float:
    """A number of the standard normal distribution."""
    return _STANDARD_NORMAL.inv_cdf(uniform(seed, purpose, first, second))


def _mixed(value: int) -> int:
    """One round of splitmix64."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
