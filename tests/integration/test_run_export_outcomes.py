"""What the export tells of an execution beside its tokens, for every way one can end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import MODEL
from msgspec.structs import replace
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import execution_id, group_id
from opengyre.gateway.delta import body_delta
from opengyre.seams.errors import ConfigError
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue
from opengyre.store.journal import open_journal
from opengyre.store.outcomes import read_outcomes
from opengyre.store.run_folder import create_run_folder
from opengyre.store.segments import SegmentWriter

NOWHERE = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
BODY = json.dumps({"messages": [{"role": "user", "content": "Do it."}]}).encode()


def turn(number: int, name: str, *, attempt: int = 0, role: str = "main") -> TokenRecord:
    header = TurnRecord(
        turn=f"{execution_id(number)}.{name}",
        execution=execution_id(number),
        attempt=attempt,
        parent="",
        fork_reason="",
        role=role,
        num_kept_tokens=0,
        num_new_prompt_tokens=1,
        num_completion_tokens=1,
        spans=[Span(start=0, end=1, policy_version=0, engine="s0")],
        finish="stop",
        is_committed=True,
        ref=NOWHERE,
        received_s=1.0,
        first_token_s=2.0,
        ended_s=3.0,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=[5],
        completion_ids=[6],
        logprobs=[-0.5],
        request_delta=body_delta(BODY, b""),
    )


class Tape:
    """A journal and its records, in order."""

    def __init__(self) -> None:
        self.values: list[JournalValue | TokenRecord] = []
        members = tuple(execution_id(n) for n in (1, 2, 3, 4, 6, 7))
        self.plan(
            c.DispatchGroups(
                command_id=c.CommandId(1),
                reason="",
                groups=((group_id(1), members),),
                version=3,
                burst=0,
            ),
            c.DispatchEval(
                command_id=c.CommandId(2),
                reason="",
                executions=(execution_id(5),),
                version=3,
                burst=0,
            ),
        )

    def plan(self, *commands: Any) -> None:
        self.values.append(c.Plan(commands=commands))

    def launch(self, number: int, launch_number: int = 1) -> None:
        self.values.append(
            seen.LaunchRecorded(
                execution=execution_id(number),
                task="trail",
                group=None if number == 5 else group_id(1),
                launch_number=launch_number,
            )
        )

    def close(
        self, number: int, reward: float | None, reason: str = "", exclusion: str = ""
    ) -> None:
        execution = execution_id(number)
        self.values.append(f.ExecutionClosed(execution=execution, outcome=f.Outcome.COMPLETED))
        self.values.append(
            f.VerdictGiven(
                execution=execution,
                reward=reward,
                reason=reason,
                num_trainable_tokens=1,
                exclusion=exclusion,
            )
        )


def a_run() -> list[JournalValue | TokenRecord]:
    tape = Tape()
    for number in (1, 2, 3, 4, 5, 6, 7):
        tape.launch(number)
    tape.values += [turn(1, "t1"), turn(1, "t2")]
    tape.launch(1, launch_number=2)
    tape.values += [turn(1, "t3"), turn(2, "t1"), turn(2, "t2", role="side"), turn(3, "t1")]
    tape.values += [turn(number, "t1") for number in (4, 5, 6, 7)]
    tape.close(1, 0.25)
    tape.close(2, 1.0)
    tape.close(3, None, "the grader did not start")
    tape.close(5, 0.5)
    tape.close(6, 0.75, exclusion="no_shaped_reward: mine.py:f raised KeyError: 'x'")
    tape.close(7, 0.5, exclusion="overlong")
    return tape.values


async def write(path: Path) -> None:
    folder = create_run_folder(path, {"model": {"path": str(MODEL)}})
    writer = SegmentWriter(folder.tokens)
    async with open_journal(folder.db) as journal:
        for value in a_run():
            if isinstance(value, TokenRecord):
                header = replace(value.header, ref=writer.append(value))
                journal.append(0.0, seen.TurnRecorded(turn=header))
            else:
                journal.append(0.0, value)
    await writer.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    run = tmp_path_factory.mktemp("runs") / "a"
    asyncio.run(write(run))
    told = CliRunner().invoke(app, ["run", "export", str(run)])
    assert told.exit_code == 0, told.output
    found = [json.loads(line) for line in told.stdout.splitlines()]
    return {f"{row['execution'][-1]}.{row['turn'].rpartition('.')[2]}": row for row in found}


def test_each_reason_not_to_train_a_turn_is_told(rows: dict[str, dict[str, Any]]) -> None:
    assert {name: row["not_trainable"] for name, row in rows.items()} == {
        "1.t1": "relaunched",
        "1.t2": "relaunched",
        "1.t3": "",
        "2.t1": "",
        "2.t2": "untrained_role",
        "3.t1": "no_verdict",
        "4.t1": "",
        "5.t1": "evaluation",
        "6.t1": "no_shaped_reward",
        "7.t1": "overlong",
    }
    assert all(row["is_trainable"] == (not row["not_trainable"]) for row in rows.values())


def test_group_task_outcome_and_verdict_are_those_of_the_execution(
    rows: dict[str, dict[str, Any]],
) -> None:
    columns = ("group", "task", "dispatch_version", "outcome", "reward", "verdict_reason", "step")
    told = {name: tuple(row[column] for column in columns) for name, row in rows.items()}
    group = group_id(1)
    assert told["1.t3"] == told["1.t1"] == (group, "trail", 3, "completed", 0.25, "", None)
    assert told["3.t1"] == (
        *(group, "trail", 3, "completed"),
        *(None, "the grader did not start", None),
    )
    assert told["4.t1"] == (group, "trail", 3, None, None, None, None)
    assert told["6.t1"] == (group, "trail", 3, "completed", 0.75, "", None)
    assert told["5.t1"] == ("", "trail", 3, "completed", 0.5, "", None)


def test_outcomes_of_no_run_db_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database at all, but long enough to be one" * 9)
    with pytest.raises(ConfigError, match=r"run\.db"):
        read_outcomes(tmp_path / "run.db")
