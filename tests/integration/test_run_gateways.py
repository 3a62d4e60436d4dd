"""Case 17 of the gateway's list: it is killed in a run and started again. Several gateways."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from run_rig import Driven, drive, make_trails, until, until_tokens_flow
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.control import facts as f
from opengyre.runtime.run import Run
from opengyre.store.observations import GatewayLost, LaunchRecorded, TurnRecorded
from opengyre.store.run_folder import open_run_folder
from opengyre.views.verify import verify_run

pytestmark = pytest.mark.timeout(180)

SLOW_TOKENS = "engine.scripted.tokens_per_s=60"
SHORT = ("run.num_steps=2", SLOW_TOKENS)


def assert_promises_are_kept(driven: Driven) -> None:
    results = verify_run(open_run_folder(driven.end.folder))
    assert not [problem for result in results for problem in result.problems]
    replayed = CliRunner().invoke(app, ["run", "replay", str(driven.end.folder)])
    assert replayed.exit_code == 0, replayed.output


async def kill_and_go_on(run: Run, name: str, *, num_tokens: int) -> None:
    """Returns once `num_tokens` more were told."""
    await until_tokens_flow(run)
    os.kill(run.processes.pid(name), signal.SIGKILL)
    await until(lambda: not run.processes.is_alive(name))
    num_before = run.told.num_sampled_tokens
    await until(lambda: run.told.num_sampled_tokens >= num_before + num_tokens)


def turns_of(driven: Driven) -> list[tuple[str, int]]:
    return [(told.turn.turn, told.turn.attempt) for told in driven.all(TurnRecorded)]


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trails(tmp_path_factory.mktemp("tasks") / "trails", 8)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, trails: Path) -> Driven:
    return drive(tmp_path_factory.mktemp("undisturbed"), trails, "run.num_steps=2")


def test_case_17_a_gateway_killed_in_a_run_is_back_with_every_turn_and_every_session_goes_on(
    tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    async def kill_twice(run: Run) -> None:
        for _ in range(2):
            await kill_and_go_on(run, "gateway0", num_tokens=200)

    killed = drive(tmp_path, trails, *SHORT, watch=kill_twice)
    assert killed.end.exit_code == 0, killed.end.reason
    lost = killed.all(GatewayLost)
    assert [one.incarnation for one in lost] == [1, 2]
    assert all(one.executions and one.gone_s is not None for one in lost)
    assert set(killed.outcomes().values()) == {f.Outcome.COMPLETED}
    assert max(Counter(turns_of(killed)).values()) == 1
    assert killed.completions() == undisturbed.completions()
    assert_promises_are_kept(killed)


def test_two_gateways_share_the_executions_and_the_death_of_one_touches_only_its_own(
    tmp_path: Path, trails: Path, undisturbed: Driven
) -> None:
    async def kill_one(run: Run) -> None:
        await until_tokens_flow(run)
        await kill_and_go_on(run, "gateway1", num_tokens=1)

    killed = drive(tmp_path, trails, *SHORT, "gateway.num_processes=2", watch=kill_one)
    assert killed.end.exit_code == 0, killed.end.reason
    (lost,) = killed.all(GatewayLost)
    assert lost.gateway == "gateway1"
    running = [one for one in killed.outcomes() if one not in lost.executions]
    assert lost.executions
    assert running
    assert set(killed.outcomes().values()) == {f.Outcome.COMPLETED}
    assert max(Counter(turns_of(killed)).values()) == 1
    assert killed.completions() == undisturbed.completions()
    assert_promises_are_kept(killed)


def test_a_gateway_that_dies_again_and_again_ends_the_run_with_a_reason(
    tmp_path: Path, trails: Path
) -> None:
    async def kill_always(run: Run) -> None:
        await until_tokens_flow(run)
        for _ in range(4):
            await kill_and_go_on(run, "gateway0", num_tokens=1)

    killed = drive(tmp_path, trails, *SHORT, watch=kill_always)
    assert killed.end.exit_code == 1
    assert "gateway0: died 4 times within 300 s" in killed.end.reason
    assert killed.all(GatewayLost)[-1].gone_s is None


IMPATIENT = (
    "{python}, -I, -S, {gyre_agent}, --instruction-file, {instruction_file}, --max-retries, 0, "
    "--max-output-tokens, 24, --context-tokens, 560"
)


def test_a_program_that_does_not_survive_the_death_of_its_gateway_is_launched_again(
    tmp_path: Path, trails: Path
) -> None:
    async def kill_once(run: Run) -> None:
        await kill_and_go_on(run, "gateway0", num_tokens=1)

    command = ", ".join(f"'{word}'" for word in IMPATIENT.split(", "))
    killed = drive(
        tmp_path,
        trails,
        *SHORT,
        'harness.profile="command"',
        f"harness.command=[{command}]",
        watch=kill_once,
    )
    assert killed.end.exit_code == 0, killed.end.reason
    launches = Counter(one.execution for one in killed.all(LaunchRecorded))
    (lost,) = killed.all(GatewayLost)
    again = {execution for execution, num in launches.items() if num == 2}
    assert again
    assert again <= set(lost.executions)
    assert set(killed.outcomes().values()) == {f.Outcome.COMPLETED}
    assert max(Counter(turns_of(killed)).values()) == 1
    assert_promises_are_kept(killed)
