"""Plays a quickstart task from what a conversation shows, perfectly or with seeded mistakes.

Owns the next action as a pure function of (instruction, commands so far with their outputs,
random generator, mistake rates). It must not know a task's right answers, files or tokens.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Chances of each mistake, per decision where it can be made."""

    trail_wrong: float = 0.0
    trail_forgotten: float = 0.0
    trail_stop: float = 0.0
    jobs_guess: float = 0.0
    jobs_wrong: float = 0.0
    jobs_stop: float = 0.0
    slip: float = 0.0

    def scaled(self, rate: float) -> Mistakes:
        """The same mistakes, each `rate` times as likely."""
        return Mistakes(**{name: getattr(self, name) * rate for name in self.__slots__})


PERFECT = Mistakes()
CLEAN = Mistakes(slip=0.06)
NOISY = Mistakes(
    trail_wrong=0.4,
    trail_forgotten=0.08,
    trail_stop=0.05,
    jobs_guess=0.4,
    jobs_wrong=0.2,
    jobs_stop=0.04,
    slip=0.03,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One command and what the shell answered."""

    command: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dice:
    """A seeded generator with the mistakes it may cause."""

    rng: random.Random
    mistakes: Mistakes

    def falls(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def number(self, right: int, wrong_chance: float) -> int:
        """`right`, or by mistake any two-digit number."""
        return self.rng.randint(10, 99) if self.falls(wrong_chance) else right


def next_command(instruction: str, history: list[Exchange], dice: Dice) -> str | None:
    """The next bash command, or None when the demonstrator has finished."""
    numbers = [int(number) for number in re.findall(r"\d+", instruction)]
    if not numbers:
        return None
    if "./job" in instruction:
        return next_jobs_command(numbers, history, dice)
    return next_trail_command(numbers[0], history, dice)


def next_trail_command(start: int, history: list[Exchange], dice: Dice) -> str | None:
    """Read a file, write its sum, read the next one; a failed read is tried again."""
    reads = [
        found
        for exchange in history
        if exchange.command.startswith("cat ")
        and (found := re.fullmatch(r"sum (\d+) (?:next (\d+)|end)", exchange.output))
    ]
    expected_file = int(reads[-1][2] or -1) if reads else start
    mistakes = dice.mistakes
    is_unwritten = bool(
        reads and history[-1].command.startswith("cat ") and history[-1].output == reads[-1][0]
    )
    if is_unwritten and not dice.falls(mistakes.trail_forgotten):
        return f"echo {dice.number(int(reads[-1][1]), mistakes.trail_wrong)} >> out"
    if expected_file < 0 or (reads and dice.falls(mistakes.trail_stop)):
        return None
    return f"cat {dice.number(expected_file, mistakes.slip)}"


def next_jobs_command(numbers: list[int], history: list[Exchange], dice: Dice) -> str | None:
    """Start all jobs, then for each in order: look, sleep while it is busy, write its result."""
    mistakes = dice.mistakes
    started = sum(exchange.output == "started" for exchange in history)
    if started < len(numbers):
        return f"./job {dice.number(numbers[started], mistakes.slip)}"
    num_written = sum(exchange.command.startswith("echo ") for exchange in history)
    if num_written >= len(numbers):
        return None
    last = history[-1]
    if num_written and last.command.startswith("echo ") and dice.falls(mistakes.jobs_stop):
        return None
    look = f"cat log/{numbers[num_written]}"
    if last.command != look:
        return f"cat log/{dice.number(numbers[num_written], mistakes.slip)}"
    if found := re.fullmatch(r"got (\d+)", last.output):
        return f"echo {dice.number(int(found[1]), mistakes.jobs_wrong)} >> out"
    if last.output != "busy":
        return f"./job {numbers[num_written]}"
    return (
        f"echo {dice.rng.randint(10, 99)} >> out" if dice.falls(mistakes.jobs_guess) else "sleep 1"
    )
