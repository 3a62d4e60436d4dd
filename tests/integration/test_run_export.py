"""`gyre run export`: what was recorded comes back in rows, as lines and as Parquet."""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from cases_rig import ANSWER, ARGUMENTS, EACH_PROTOCOL, THOUGHT, WORDS, open_case, witness
from cases_speakers import SPEAKERS, Said, Speaker
from gateway_rig import MODEL
from msgspec import to_builtins
from run_rig import Driven, drive, make_trails
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.runtime.exporting.recorded import open_recorded
from opengyre.runtime.exporting.rows import rows_of
from opengyre.runtime.recording.standalone import records_folder
from opengyre.seams.records import TokenRecord
from opengyre.store.observations import MicroStepDone, StepReport
from opengyre.store.segments import SegmentReader, SegmentWriter

Row = dict[str, Any]


def record_folder(folder: Path, records: list[TokenRecord]) -> Path:
    """The folder of a gateway on its own."""

    async def write() -> None:
        with records_folder(folder, MODEL) as made:
            writer = SegmentWriter(made.tokens)
            for record in records:
                writer.append(record)
            await writer.close()

    asyncio.run(write())
    return folder


async def three_turns(speaker: Speaker) -> tuple[list[TokenRecord], dict[str, list[int]]]:
    """Records of three turns, the second one tried twice, and the prompts the engine was given."""
    engine = witness(lambda text, seed: ANSWER, tokens_per_s=400)
    async with open_case({"s0": engine}) as case:
        one = case.harness(speaker)
        one.history.insert(0, Said(role="system", text="You act. é"))
        await one.turn(stream=True)
        await one.leave(one.body(stream=True), after=b"W")
        await one.turn(stream=True)
        await one.turn(stream=False)
        await case.close()
        given = {asked.request_id: asked.prompt_ids for asked in engine.requests}
        return case.rig.recorder.records, given


def run_export(*words: str) -> Any:
    return CliRunner().invoke(app, ["run", "export", *words])


def lines_of(text: str) -> list[Row]:
    return [json.loads(line) for line in text.splitlines()]


@EACH_PROTOCOL
def test_rows_hold_what_the_client_sent_what_the_engine_got_and_what_it_gave(
    tmp_path: Path, speaker: Speaker
) -> None:
    records, given = asyncio.run(three_turns(speaker))
    folder = record_folder(tmp_path / "records", records)
    out = tmp_path / "rows.jsonl"
    told = run_export(str(folder), "--out", str(out), "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout) == {
        "out": str(out),
        "num_rows": 4,
        "num_executions": 1,
        "num_unfinished": 0,
        "problems": [],
    }
    rows = lines_of(out.read_text())
    assert [(row["turn"], row["attempt"], row["is_committed"]) for row in rows] == [
        ("e000001.t1", 0, True),
        ("e000001.t2", 0, False),
        ("e000001.t2", 1, True),
        ("e000001.t3", 0, True),
    ]
    for row, record in zip(rows, records, strict=True):
        prompts = [ids for name, ids in given.items() if name.startswith(_name(row))]
        assert row["prompt_ids"] == prompts[0]
        assert row["completion_ids"] == record.completion_ids
        assert row["logprobs"] == pytest.approx(record.logprobs)
        assert row["spans"][0]["end"] == len(record.completion_ids)
        assert (row["schema"], row["protocol"]) == (2, speaker.name)
        assert row["problem"] == ""
    assert [row["not_trainable"] for row in rows] == ["", "not_committed", "", ""]
    assert {row["trained"] for row in rows} == {None}
    assert rows[0]["is_trainable"]
    assert not rows[1]["is_trainable"]
    _check_messages(rows)


def _name(row: Row) -> str:
    return f"{row['turn']}.a{row['attempt']}"


def _check_messages(rows: list[Row]) -> None:
    answer = rows[0]["answer"]
    (call,) = answer["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("bash", json.loads(ARGUMENTS))
    assert (answer["role"], answer["content"].strip()) == ("assistant", WORDS)
    assert answer["reasoning"].strip() == THOUGHT
    assert [one["role"] for one in rows[3]["messages"]] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
    ]
    assert rows[3]["messages"][0]["content"] == "You act. é"
    assert rows[3]["messages"][3]["content"] == "result of 0"
    assert json.loads(rows[3]["tools"])[0]["function"]["name"] == "bash"
    assert rows[1]["messages"] == rows[2]["messages"]


def test_parquet_holds_the_rows_of_the_lines(tmp_path: Path) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[0]))
    folder = record_folder(tmp_path / "records", records)
    lines = run_export(str(folder))
    assert lines.exit_code == 0, lines.output
    out = tmp_path / "rows.parquet"
    told = run_export(str(folder), "--format", "parquet", "--out", str(out))
    assert told.exit_code == 0, told.output
    assert told.stdout == f"4 rows of 1 executions in {out}\n"
    table = parquet.read_table(out)
    assert table.schema.metadata[b"opengyre.schema"] == b"2"
    assert table.to_pylist() == lines_of(lines.stdout)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["records", "rows.parquet"]


def test_a_damaged_record_is_named_and_only_its_descendants_lose_their_prompts(
    tmp_path: Path,
) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[0]))
    folder = record_folder(tmp_path / "records", records)
    segment = folder / "tokens" / "0000.seg"
    damaged = next(SegmentReader(folder / "tokens").scan(0)).header.ref.offset_bytes + 40
    whole = bytearray(segment.read_bytes())
    whole[damaged] ^= 1
    segment.write_bytes(whole + whole[8:30])
    told = run_export(str(folder))
    assert told.exit_code == 1
    rows = lines_of(told.stdout)
    assert [row["turn"][-2:] for row in rows] == ["t2", "t2", "t3"]
    assert [row["prompt_ids"] for row in rows] == [None] * 3
    assert [row["completion_ids"] for row in rows] == [one.completion_ids for one in records[1:]]
    assert rows[0]["problem"] == "tokens: its parent e000001.t1 is not restored"
    assert "gyre: segment 0 at 8: a damaged record of" in told.stderr
    assert "e000001.t3 attempt 0: tokens: its parent e000001.t2 is not restored" in told.stderr


def test_whatever_bytes_are_damaged_what_is_told_is_true(tmp_path: Path) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[2]))
    folder = record_folder(tmp_path / "records", records)
    segment = folder / "tokens" / "0000.seg"
    whole = segment.read_bytes()
    known = {_name(row): row for row in rows_in(folder)[0]}
    for seed in range(60):
        source = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            at, size = source.randrange(8, len(whole)), source.choice([1, 4, 400])
            damaged[at : at + size] = source.randbytes(source.choice([size, 0, 2 * size]))
        segment.write_bytes(damaged)
        rows, problems = rows_in(folder)
        assert len(rows) == len(known) or problems
        for row in rows:
            kept = {key for key in row if row[key] is not None} - {"problem", "offset_bytes"}
            if not row["problem"]:
                assert kept >= {"messages", "answer", "prompt_ids", "tools"}
            assert {key: row[key] for key in kept} == {key: known[_name(row)][key] for key in kept}


def rows_in(folder: Path) -> tuple[list[Row], list[str]]:
    recorded = open_recorded(folder)
    rows = [to_builtins(row) for row in rows_of(recorded)]
    totals = recorded.totals
    return rows, [*totals.problems, *["unfinished"] * totals.num_unfinished]


def test_an_unfinished_record_at_the_end_is_no_failure(tmp_path: Path) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[0]))
    folder = record_folder(tmp_path / "records", records)
    segment = folder / "tokens" / "0000.seg"
    segment.write_bytes(segment.read_bytes()[:-5])
    out = tmp_path / "rows.jsonl"
    told = run_export(str(folder), "--out", str(out), "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["num_unfinished"] == 1
    assert len(lines_of(out.read_text())) == 3


def test_one_execution_of_several_can_be_asked_for(tmp_path: Path) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[0]))
    folder = record_folder(tmp_path / "records", records)
    told = run_export(str(folder), "--execution", "e000001")
    assert len(lines_of(told.stdout)) == 4
    missing = run_export(str(folder), "--execution", "e000009")
    assert missing.exit_code == 2
    assert missing.stderr == "gyre: e000009: no turn of it is recorded\n"


def test_what_cannot_be_exported_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, _ = asyncio.run(three_turns(SPEAKERS[0]))
    folder = record_folder(tmp_path / "records", records)
    wrong = {
        "expected one of jsonl, parquet": ["--format", "csv"],
        "--format parquet needs --out FILE": ["--format", "parquet"],
        "--json tells about a file": ["--json"],
        "cannot be written": ["--out", str(tmp_path / "no" / "file")],
        "tokenizer": ["--model", str(tmp_path)],
    }
    for words, options in wrong.items():
        told = run_export(str(folder), *options)
        assert told.exit_code == 2, told.output
        assert words in told.stderr
        assert told.stderr.count("\n") == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = run_export(str(folder), "--format", "parquet", "--out", str(tmp_path / "p"))
    assert told.exit_code == 2
    assert "pip install 'opengyre[parquet]'" in told.stderr
    assert run_export(str(tmp_path)).exit_code == 2


@pytest.mark.timeout(180)
def test_a_run_tells_group_task_verdict_and_step_beside_each_turn(tmp_path: Path) -> None:
    trails = make_trails(tmp_path / "trails", 4)
    driven = drive(tmp_path, trails, "run.num_steps=2")
    out = tmp_path / "rows.parquet"
    told = run_export(str(driven.end.folder), "--format", "parquet", "--out", str(out), "--json")
    assert told.exit_code == 0, told.output
    rows = parquet.read_table(out).to_pylist()
    assert {row["execution"] for row in rows} == set(driven.outcomes())
    trained = [row for row in rows if row["group"]]
    assert trained
    for row in trained:
        assert row["outcome"] == "completed"
        assert row["reward"] is not None
        assert row["task"]
        assert row["dispatch_version"] == 0
        assert row["is_trainable"]
    assert 1 in {row["step"] for row in trained}
    _check_what_was_trained(rows, driven)
    completions = driven.completions()
    for row in rows:
        assert tuple(row["completion_ids"]) == completions[row["turn"]]
        assert row["spans"][-1]["end"] == len(row["completion_ids"])
    for row in rows:
        if not row["group"]:
            assert row["not_trainable"] == "evaluation"


def _check_what_was_trained(rows: list[Row], driven: Driven) -> None:
    """The ranges are all that accepted steps trained, in turns that may be trained."""
    steps = {report.step: report for report in driven.all(StepReport)}
    told = sum(
        end - start
        for one in driven.all(MicroStepDone)
        if one.number in steps[one.step].micro_steps
        for path in one.paths
        for start, end in path.trained
    )
    found = [(row, one) for row in rows for one in row["trained"]]
    assert sum(one["end"] - one["start"] for _, one in found) == told > 0
    for row, one in found:
        assert row["is_trainable"]
        assert row["step"] is not None
        assert 0 <= one["start"] < one["end"] <= len(row["completion_ids"])
