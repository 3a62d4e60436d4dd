"""The quickstart's two task families: what a task is, how it is drawn, how it is scored.

Owns the tasks' files, texts, right answers and score. It must not know models, tokens, or how a
task is played (demonstrator.py) or stored (make_tasks.py).

Invariants: everything is a function of the seed; a set of tasks is stratified, so that any two
sets of one size hold the same trail lengths, numbers of jobs and spread of waits; no right answer
of a job stands in its workspace as text before the job has ended.

trail: a chain of files, each with a number to copy and the next file's name.
jobs: background jobs of long-tailed duration whose results appear in log files.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

TRAIL_LENGTHS = (2, 3, 4, 5, 6, 7)
JOB_COUNTS = (1, 2, 3)
MEDIAN_JOB_S = 2.0
SIGMA_JOB = 0.55
SHORTEST_JOB_S = 0.8
LONGEST_JOB_S = 6.0
MAX_OUT_BYTES = 4096

TRAIL_TEXT = (
    "Append the sum in each file of a trail to the file out, in order, until a file says end. "
    "The trail starts at file {}."
)
JOBS_TEXT = (
    "Start ./job for each of these numbers, wait (sleep) until log/NUMBER says got, "
    "and append the results to the file out in this order: {}."
)
JOB_SCRIPT = """\
#!/bin/bash
# ./job NUMBER starts one job in the background; log/NUMBER says busy, then got RESULT.
case "$1" in
{cases}
*) echo "no job $1"; exit 1 ;;
esac
mkdir -p log
echo started
[ -e "log/$1" ] && exit
echo busy > "log/$1"
(sleep "$wait_s"; echo "got $(( ($1 * {factor} + {salt}) % 90 + 10 ))" > "log/.$1"
 exec mv "log/.$1" "log/$1") < /dev/null > /dev/null 2>&1 &
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One background job: its number, how long it works, what it finds."""

    number: int
    duration_s: float
    result: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; `files` maps paths in the workspace to texts, `expected` is what out must hold."""

    family: str
    instruction: str
    files: dict[str, str]
    executables: tuple[str, ...]
    jobs: tuple[Job, ...]
    expected: tuple[int, ...]


def trail_task(rng: random.Random, length: int) -> Task:
    names = rng.sample(range(10, 100), length)
    sums = tuple(rng.randint(10, 99) for _ in names)
    ends = [f"next {name}" for name in names[1:]] + ["end"]
    files = {
        str(name): f"sum {value} {end}\n"
        for name, value, end in zip(names, sums, ends, strict=True)
    }
    return Task(
        family="trail",
        instruction=TRAIL_TEXT.format(names[0]),
        files=files,
        executables=(),
        jobs=(),
        expected=sums,
    )


def jobs_task(rng: random.Random, durations_s: list[float]) -> Task:
    """A task with one job per duration; results follow from the job's number and a salt."""
    numbers = rng.sample(range(10, 100), len(durations_s))
    factor, salt = rng.choice((7, 11, 13, 17, 19, 23)), rng.randint(100, 999)
    jobs = tuple(
        Job(number=number, duration_s=duration_s, result=(number * factor + salt) % 90 + 10)
        for number, duration_s in zip(numbers, durations_s, strict=True)
    )
    cases = "\n".join(f"{job.number}) wait_s={job.duration_s:g} ;;" for job in jobs)
    return Task(
        family="jobs",
        instruction=JOBS_TEXT.format(" ".join(str(number) for number in numbers)),
        files={"job": JOB_SCRIPT.format(cases=cases, factor=factor, salt=salt)},
        executables=("job",),
        jobs=jobs,
        expected=tuple(job.result for job in jobs),
    )


def job_duration_s(quantile: float) -> float:
    """The lognormal wait at a quantile in (0, 1), cut at both ends, in whole 10 ms."""
    wait_s = MEDIAN_JOB_S * math.exp(SIGMA_JOB * NormalDist().inv_cdf(quantile))
    return round(min(max(wait_s, SHORTEST_JOB_S), LONGEST_JOB_S), 2)


def strata(rng: random.Random, values: tuple[int, ...], num: int) -> list[int]:
    """`num` values, each as often as any other (give or take one), in random order."""
    drawn = [values[index * len(values) // num] for index in range(num)]
    rng.shuffle(drawn)
    return drawn


def draw_tasks(seed: int, num: int) -> list[Task]:
    """`num` tasks, trail and jobs by turns, stratified, as a function of the seed.

    Raises ValueError if num is below 2 or odd.
    """
    if num < 2 or num % 2:
        raise ValueError(f"the number of tasks must be even and at least 2, not {num}")
    rng = random.Random(seed)
    lengths = strata(rng, TRAIL_LENGTHS, num // 2)
    counts = strata(rng, JOB_COUNTS, num // 2)
    num_jobs = sum(counts)
    waits_s = [job_duration_s((index + rng.random()) / num_jobs) for index in range(num_jobs)]
    rng.shuffle(waits_s)
    tasks = []
    for length, count in zip(lengths, counts, strict=True):
        tasks.append(trail_task(rng, length))
        tasks.append(jobs_task(rng, [waits_s.pop() for _ in range(count)]))
    return tasks


def score(task: Task, out: str | None) -> float:
    """Share of right lines in place, less half a line for each line too many; never below 0.

    `out` is the text of the file out, None if there is none. Rounded down to four decimals, as
    the tasks' own tests/test.sh does.
    """
    lines = (out or "")[:MAX_OUT_BYTES].replace("\0", "").replace("\r", "").split("\n")
    lines = [line.strip(" \t") for line in lines[: -1 if not lines[-1] else None]]
    wanted = [str(value) for value in task.expected]
    right = sum(line == want for line, want in zip(lines, wanted, strict=False))
    extra = max(0, len(lines) - len(wanted))
    return max(0, (2 * right - extra) * 10_000 // (2 * len(wanted))) / 10_000
