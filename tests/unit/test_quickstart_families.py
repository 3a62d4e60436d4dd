"""The quickstart's tasks, their simulator and demonstrator, beside a real bash."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import demonstrator  # noqa: E402
import families  # noqa: E402
import make_tasks  # noqa: E402
import scripted_policy  # noqa: E402
from simulated_shell import SimulatedShell  # noqa: E402

from opengyre.harness import gyre_agent  # noqa: E402

USER = "<|im_start|>user\n{}<|im_end|>\n"
AGENT = "<|im_start|>assistant\n"
RESULT = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"


class RealShell:
    """A task's workspace on disk; commands run as gyre-agent runs them."""

    def __init__(self, task: families.Task, folder: Path) -> None:
        self._task = folder / "task"
        make_tasks.write_folder(self._task, task)
        self.workspace = self._task / "environment" / "workspace"

    def run(self, command: str) -> str:
        before = os.getcwd()
        os.chdir(self.workspace)
        try:
            return gyre_agent.run_bash(command, timeout_s=5, max_output_bytes=4000)
        finally:
            os.chdir(before)

    def reward(self) -> float:
        verifier = self._task.parent / "verifier"
        subprocess.run(
            ["bash", self._task / "tests" / "test.sh"],
            env={
                "PATH": "/usr/bin:/bin",
                "GYRE_WORKSPACE": str(self.workspace),
                "GYRE_VERIFIER_DIR": str(verifier),
            },
            check=True,
            timeout=5,
        )
        return float((verifier / "reward.txt").read_text())


def tasks_of(family: str, seed: int = 5, num: int = 32) -> list[families.Task]:
    return [task for task in families.draw_tasks(seed, num) if task.family == family]


def with_durations(task: families.Task, duration_s: float) -> families.Task:
    """The same jobs, all ending after `duration_s`."""
    jobs = tuple(replace(job, duration_s=duration_s) for job in task.jobs)
    script = task.files["job"]
    for job in task.jobs:
        script = script.replace(f"wait_s={job.duration_s:g} ", f"wait_s={duration_s:g} ")
    return replace(task, jobs=jobs, files={"job": script})


def play_script(task: families.Task, shell, *, seed: int, mistake_rate: float) -> list[str]:
    """Play a task through the scripted policy's text interface; returns commands and outputs."""
    text = USER.format(task.instruction) + AGENT
    lines: list[str] = []
    while len(lines) < 48:
        turn = scripted_policy.respond(text, seed, mistake_rate=mistake_rate)
        if turn == demonstrator.DONE:
            return lines
        command = scripted_policy.read_command(turn.split("\n")[1])
        output = shell.run(command)
        lines += [command, output]
        text += turn + RESULT.format(output) + AGENT
    return lines


def test_a_seed_always_gives_the_same_tasks_and_another_seed_gives_others():
    assert families.draw_tasks(7, 32) == families.draw_tasks(7, 32)
    assert families.draw_tasks(7, 32) != families.draw_tasks(8, 32)


def test_any_two_sets_hold_the_same_mix_of_families_lengths_and_waits():
    def mix(seed: int):
        tasks = families.draw_tasks(seed, 32)
        lengths = sorted((task.family, len(task.expected)) for task in tasks)
        waits_s = sorted(job.duration_s for task in tasks for job in task.jobs)
        return [task.family for task in tasks], lengths, waits_s

    (first_order, first_mix, first_s), (second_order, second_mix, second_s) = mix(1), mix(2)
    assert first_order == second_order == ["trail", "jobs"] * 16
    assert first_mix == second_mix
    assert abs(sum(first_s) - sum(second_s)) < 0.1 * sum(first_s)


def test_waits_have_a_long_tail_within_their_bounds():
    waits_s = [families.job_duration_s((index + 0.5) / 1000) for index in range(1000)]
    assert waits_s[0] == families.SHORTEST_JOB_S
    assert waits_s[-1] == families.LONGEST_JOB_S
    assert waits_s[950] > 2.4 * waits_s[500]


def test_no_result_of_a_job_stands_in_its_workspace_as_text():
    for seed in range(20):
        for task in tasks_of("jobs", seed):
            for job in task.jobs:
                assert f"got {job.result}" not in task.files["job"]


@pytest.mark.parametrize("num", [0, 1, 7])
def test_a_number_of_tasks_that_cannot_be_halved_is_refused(num: int):
    with pytest.raises(ValueError, match="even"):
        families.draw_tasks(1, num)


def test_playing_perfectly_earns_everything_within_the_turn_limit():
    for task in families.draw_tasks(11, 96):
        shell = SimulatedShell(task)
        lines = play_script(task, shell, seed=0, mistake_rate=0.0)
        assert families.score(task, shell.out) == 1.0
        assert len(lines) // 2 < 24


def test_playing_with_mistakes_earns_between_nothing_and_everything():
    rewards = []
    for seed, task in enumerate(families.draw_tasks(12, 96)):
        shell = SimulatedShell(task)
        play_script(task, shell, seed=seed, mistake_rate=1.0)
        rewards.append(families.score(task, shell.out))
    assert 0.3 < sum(rewards) / len(rewards) < 0.6
    assert {0.0, 1.0} < set(rewards)


def test_the_scripted_policy_depends_on_text_and_seed_only():
    text = USER.format(families.TRAIL_TEXT.format(37)) + AGENT
    turns = {scripted_policy.respond(text, 3, mistake_rate=1.0) for _ in range(5)}
    assert len(turns) == 1
    assert scripted_policy.respond(text, 3) == scripted_policy.respond(text, 4)


def test_the_scripted_policy_reads_a_broken_call_as_an_empty_command():
    text = USER.format("Go.") + AGENT + "<tool_call>\n{\n</tool_call>" + RESULT.format("error")
    instruction, history = scripted_policy.read_conversation(text + AGENT)
    assert instruction == "Go."
    assert history == [demonstrator.Exchange(command="", output="error")]


def test_a_played_trail_gives_the_same_outputs_and_reward_on_a_real_bash(tmp_path: Path):
    for seed, task in enumerate(tasks_of("trail")[:6]):
        simulated, real = SimulatedShell(task), RealShell(task, tmp_path / str(seed))
        expected = play_script(task, simulated, seed=seed, mistake_rate=1.0)
        assert play_script(task, real, seed=seed, mistake_rate=1.0) == expected
        assert real.reward() == families.score(task, simulated.out)


def test_played_jobs_that_have_ended_give_the_same_on_a_real_bash(tmp_path: Path):
    for seed, drawn in enumerate(tasks_of("jobs")[:6]):
        task = with_durations(drawn, 0.01)
        simulated, real = SimulatedShell(task), RealShell(task, tmp_path / str(seed))
        for job in task.jobs:
            assert real.run(f"./job {job.number}") == simulated.run(f"./job {job.number}")
        time.sleep(0.05)
        for job in task.jobs:
            look = f"cat log/{job.number}"
            assert real.run(look) == simulated.run(look) == f"got {job.result}"
            real.run(f"echo {job.result} >> out")
        assert real.reward() == 1.0


def test_a_job_at_work_looks_the_same_on_a_real_bash(tmp_path: Path):
    task = with_durations(tasks_of("jobs")[0], 0.4)
    number = task.jobs[0].number
    simulated, real = SimulatedShell(task), RealShell(task, tmp_path)
    commands = [f"./job {number}", f"cat log/{number}", f"./job {number}", "./job 5"]
    commands += ["cat log/5", "cat 5", "echo 7 >> out", "cat out", "nonsense"]
    assert [real.run(line) for line in commands] == [simulated.run(line) for line in commands]


@pytest.mark.parametrize(
    "out",
    [
        "",
        "\n",
        "x\n",
        "1",
        " 1 \n2\n",
        "1\n2\n3\n4\n5\n6\n7\n8\n9\n",
        "1\r\n2\r\n",
        "9" * 9000,
        "1\0\n",
    ],
)
def test_the_test_script_scores_as_the_scorer_does(out: str, tmp_path: Path):
    task = replace(tasks_of("trail")[0], expected=(1, 2, 3))
    real = RealShell(task, tmp_path)
    (real.workspace / "out").write_bytes(out.encode())
    assert real.reward() == families.score(task, out)


def test_a_missing_or_linked_out_earns_nothing(tmp_path: Path):
    task = tasks_of("trail")[0]
    real = RealShell(task, tmp_path)
    assert real.reward() == 0.0
    (real.workspace / "out").symlink_to("../../tests/expected")
    assert real.reward() == 0.0


def test_task_folders_are_the_same_bytes_every_time(tmp_path: Path):
    make_tasks.make_tasks(3, 4, tmp_path / "one", [])
    make_tasks.make_tasks(3, 4, tmp_path / "two", [])
    first = make_tasks.contents(tmp_path / "one")
    assert first == make_tasks.contents(tmp_path / "two")
    assert "001-jobs/environment/workspace/job" in first
    make_tasks.make_tasks(3, 4, tmp_path / "one", [])


def test_tasks_that_are_to_be_avoided_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train, heldout = str(tmp_path / "train"), str(tmp_path / "eval")
    assert make_tasks.main(["--seed", "1", "--num", "4", "--out", train]) == 0
    avoiding = ["--num", "4", "--out", heldout, "--avoid", train]
    assert make_tasks.main(["--seed", "1", *avoiding]) == 2
    assert "choose another --seed" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train"]
    assert make_tasks.main(["--seed", "2", *avoiding]) == 0


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(make_tasks.InputError, match="holds other files"):
        make_tasks.make_tasks(1, 4, tmp_path, [])
    assert (tmp_path / "mine").read_text() == "keep"
