"""A pretend bash for the quickstart's tasks: same outputs and files, no processes, no waiting.

Owns the few commands a policy of this family writes; any other line is answered as bash answers a
command it does not find. Time is a number that commands and turns move on. It must not know
models, tokens or scores.
"""

from __future__ import annotations

import re

from families import Task


class SimulatedShell:
    """One task's workspace and clock. Not for reuse after a play."""

    def __init__(self, task: Task, *, turn_s: float = 0.15) -> None:
        self._files = dict(task.files)
        self._jobs = {str(job.number): job for job in task.jobs}
        self._ends_s: dict[str, float] = {}
        self._turn_s = turn_s
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def out(self) -> str | None:
        """The text of the file out, None if there is none."""
        return self._files.get("out")

    def run(self, command: str) -> str:
        """The output of one command, stdout and stderr, without the last newline."""
        self._now_s += self._turn_s
        if written := re.fullmatch(r" *echo +([\w.]+) *>> *out *", command):
            self._files["out"] = self._files.get("out", "") + written[1] + "\n"
            return ""
        words = command.split()
        match words:
            case ["cat", path]:
                return self._read(path)
            case ["sleep", wait] if re.fullmatch(r"\d+", wait):
                self._now_s += int(wait)
                return ""
            case ["./job", number] if "job" in self._files:
                return self._start(number)
            case ["./job"] | ["./job", _]:
                return "bash: line 1: ./job: No such file or directory"
            case _:
                return f"bash: line 1: {(words or [''])[0]}: command not found"

    def _read(self, path: str) -> str:
        number = path.removeprefix("log/")
        if path != number and number in self._ends_s:
            is_ended = self._now_s >= self._ends_s[number]
            return f"got {self._jobs[number].result}" if is_ended else "busy"
        if path in self._files:
            return self._files[path].rstrip("\n")
        return f"cat: {path}: No such file or directory"

    def _start(self, number: str) -> str:
        if number not in self._jobs:
            return f"no job {number}"
        self._ends_s.setdefault(number, self._now_s + self._jobs[number].duration_s)
        return "started"
