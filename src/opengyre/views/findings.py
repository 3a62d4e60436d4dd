"""What a check of one promise found.

Owns: counting what was checked and keeping the first problems. Must not know: any promise.
Invariant: a promise with nothing to check is not kept, it is untried, and says so.
"""

from dataclasses import dataclass, field

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """`num_checked` things of the kind `unit`; `problems` holds the first of `num_problems`."""

    promise: str
    words: str
    unit: str
    num_checked: int
    num_problems: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        return self.num_problems == 0

    def line(self) -> str:
        verdict = "pass" if self.is_kept else "FAIL"
        if self.is_kept and self.num_checked == 0:
            verdict = "none"
        text = f"{self.promise:<4}{verdict:<5} {self.words} ({self.num_checked} {self.unit})"
        return text if self.is_kept else f"{text}: {self.num_problems} broken"


@dataclass(slots=True, kw_only=True)
class Findings:
    """Collects one CheckResult."""

    promise: str
    words: str
    unit: str
    num_checked: int = 0
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def expect(self, is_true: bool, words: str) -> None:
        """One thing was checked; `words` tell what is wrong if it is."""
        self.num_checked += 1
        if not is_true:
            self.broken(words)

    def broken(self, words: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(words)

    def result(self) -> CheckResult:
        return CheckResult(
            promise=self.promise,
            words=self.words,
            unit=self.unit,
            num_checked=self.num_checked,
            num_problems=self.num_problems,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
        )
