"""Sub-agents and compaction of the real programs: labelled branches of one execution."""

import json
from collections import Counter

import pytest
from director import SUB_AGENT, WAIT, Director, shell
from program_rig import Outcome, Scene, profile_of

from opengyre.config.harness_profile import HarnessProfile, HomeFile

pytestmark = pytest.mark.timeout(200)

WITH_SUB_AGENTS = ("claude-code", "codex", "qwen-code")
FLOOD = "head -c 29000 /dev/zero | tr '\\0' x"
SPEAK_TO_CLAUDE = """\
mkfifo lines
{
    sed -n 1p "$1"
    for _ in $(seq 300); do [ -e out ] && break; sleep 0.1; done
    sleep 1
    sed -n 2p "$1"
    sleep 5
    sed -n 3p "$1"
} > lines &
exec "$0" -p --input-format stream-json --output-format stream-json --verbose \\
    --dangerously-skip-permissions < lines
"""


def roles_of(run: Outcome) -> Counter[str]:
    return Counter(record.header.role for record in run.committed)


def with_files(
    profile: HarnessProfile, *files: HomeFile, argv: tuple[str, ...] = ()
) -> HarnessProfile:
    """A user's own variant of a shipped profile."""
    launch = profile.launch
    changed = {"files": files, "argv": argv or launch.argv}
    return profile.model_copy(update={"launch": launch.model_copy(update=changed)})


@pytest.mark.parametrize("name", WITH_SUB_AGENTS)
def test_case_6_concurrent_sub_agents_are_branches_that_leave_the_main_one_whole(name: str) -> None:
    waits = ((WAIT,), (WAIT,)) if name == "codex" else ()
    start, end = (shell("echo one >> out"),), (shell("echo two >> out"),)
    director = Director(
        main=(start, (SUB_AGENT, SUB_AGENT), *waits, end),
        sub=((shell("echo sub >> out"),),),
    )
    run = Scene(profile_of(name), respond=director.respond).run()
    run.check_ended_well()
    run.check_recorded_exactly()
    assert sorted(run.files["out"].split()) == ["one", "sub", "sub", "two"]
    assert roles_of(run)["sub-agent"] == 4
    mains = [record for record in run.committed if record.header.role == "main"]
    assert [record.header.fork_reason for record in mains] == [""] * len(mains)
    assert len(run.committed) == len(run.calls)


@pytest.mark.parametrize("name", WITH_SUB_AGENTS)
def test_case_4_results_of_parallel_calls_attach_in_whatever_order_they_come(name: str) -> None:
    director = Director(
        main=(
            (shell("sleep 0.7; echo slow >> out"), shell("echo fast >> out"), shell("ls numbers")),
            (shell("cat out"),),
        )
    )
    run = Scene(profile_of(name), respond=director.respond).run()
    run.check_ended_well()
    assert sorted(run.files["out"].split()) == ["fast", "slow"]
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    assert len(run.committed) == len(run.calls) == 3


def compacting(name: str) -> tuple[HarnessProfile, Director]:
    """The profile made to compact early, and what the model does before and after."""
    profile = profile_of(name)
    before = tuple((shell(f"echo {number} >> out; {FLOOD}"),) for number in range(6))
    after = ((shell("echo after >> out"),),)
    if name == "codex":
        (file,) = profile.launch.files
        limits = "model_context_window = 60000\nmodel_auto_compact_token_limit = 50000\n"
        profile = with_files(profile, HomeFile(path=file.path, text=limits + file.text))
    if name == "claude-code":
        lines = [
            json.dumps({"type": "user", "message": {"role": "user", "content": text}})
            for text in ("Do the first part.", "/compact", "Go on.")
        ]
        before = before[:1]
        profile = with_files(
            profile,
            HomeFile(path="lines.jsonl", text="\n".join(lines) + "\n"),
            argv=("/bin/bash", "-c", SPEAK_TO_CLAUDE, "{program}", "{home}/lines.jsonl"),
        )
    return profile, Director(main=before, after=after)


@pytest.mark.parametrize("name", WITH_SUB_AGENTS)
def test_case_7_a_compaction_is_labelled_and_work_goes_on_from_a_new_root(name: str) -> None:
    profile, director = compacting(name)
    run = Scene(profile, respond=director.respond).run()
    run.check_ended_well()
    run.check_recorded_exactly()
    assert roles_of(run)["main-summary"] == 1
    assert set(roles_of(run)) == {"main", "main-summary"}
    if name != "qwen-code":
        assert run.files["out"].split()[-1] == "after"
