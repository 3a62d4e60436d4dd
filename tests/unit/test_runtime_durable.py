"""A gateway's new life finds what earlier ones wrote of its sessions, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from opengyre.runtime.durable import recover
from opengyre.runtime.messages import GatewaySetup, OpenSession
from opengyre.seams.errors import ConfigError
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader, SegmentWriter

NOWHERE = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)


def record(turn: str) -> TokenRecord:
    header = TurnRecord(
        turn=turn,
        execution=turn.partition(".")[0],
        attempt=0,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=1,
        num_completion_tokens=1,
        spans=[],
        finish="stop",
        is_committed=True,
        ref=NOWHERE,
        received_s=0.0,
        first_token_s=0.0,
        ended_s=0.0,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=[1],
        completion_ids=[2],
        logprobs=[-0.5],
        request_delta=b"",
    )


def write(writer: SegmentWriter, *turns: str) -> list[SegmentRef]:
    return [writer.append(record(turn)) for turn in turns]


def setup_of(
    folder: Path,
    *sessions: tuple[str, int],
    told: SegmentRef | None = None,
    turns: list[SegmentRef] | None = None,
) -> GatewaySetup:
    return GatewaySetup(
        config_json="",
        tokens_dir=str(folder),
        listen_fd=-1,
        sessions=[
            OpenSession(
                execution=name,
                key="k",
                engine="c0",
                seed=0,
                first_turn=first_turn,
                turns=turns or [],
            )
            for name, first_turn in sessions
        ],
        told=told,
    )


def recovered(setup: GatewaySetup) -> dict[str, tuple[list[str], list[str]]]:
    found = asyncio.run(recover(setup))
    return {
        name: (
            [record.header.turn for record in one.told],
            [record.header.turn for record in one.untold],
        )
        for name, one in found.items()
    }


def test_two_writers_of_one_folder_never_share_a_file_and_each_ones_numbers_grow(
    tmp_path: Path,
) -> None:
    one, other = (SegmentWriter(tmp_path, rotate_bytes=1) for _ in range(2))
    refs: dict[SegmentWriter, list[SegmentRef]] = {one: [], other: []}
    for number in range(6):
        for writer, found in refs.items():
            found += write(writer, f"e{number}.t1")
    for writer in refs:
        asyncio.run(writer.close())
    segments = [[ref.segment for ref in found] for found in refs.values()]
    assert all(sorted(numbers) == numbers for numbers in segments)
    assert not set(segments[0]) & set(segments[1])
    for found in refs.values():
        for number, ref in enumerate(found):
            assert SegmentReader(tmp_path).read(ref).header.turn == f"e{number}.t1"


def test_the_sessions_that_go_on_get_the_records_of_their_launch_in_order(tmp_path: Path) -> None:
    for turns in (("e1.t1", "e2.t1", "e1.t2"), ("e1.t3", "e3.t1", "e1.t4")):
        writer = SegmentWriter(tmp_path)
        write(writer, *turns)
        asyncio.run(writer.close())
    assert recovered(setup_of(tmp_path, ("e1", 1), ("e3", 0), ("e4", 0))) == {
        "e1": ([], ["e1.t2", "e1.t3", "e1.t4"]),
        "e3": ([], ["e3.t1"]),
        "e4": ([], []),
    }


def test_only_what_lies_behind_the_last_told_turn_is_told(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    refs = write(writer, "e1.t1", "e1.t2")
    asyncio.run(writer.close())
    writer = SegmentWriter(tmp_path)
    refs += write(writer, "e1.t3")
    asyncio.run(writer.close())
    names = ["e1.t1", "e1.t2", "e1.t3"]
    for num_told in (1, 2, 3):
        setup = setup_of(tmp_path, ("e1", 0), told=refs[num_told - 1], turns=refs[:num_told])
        assert recovered(setup) == {"e1": (names[:num_told], names[num_told:])}


def test_a_record_torn_by_the_death_never_happened(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    write(writer, "e1.t1", "e1.t2")
    asyncio.run(writer.close())
    path = tmp_path / "0000.seg"
    path.write_bytes(path.read_bytes()[:-3])
    assert recovered(setup_of(tmp_path, ("e1", 0))) == {"e1": ([], ["e1.t1"])}


def test_a_first_life_reads_nothing(tmp_path: Path) -> None:
    assert recovered(setup_of(tmp_path / "missing")) == {}


def test_files_before_the_last_told_turn_are_read_only_where_a_session_has_turns(
    tmp_path: Path,
) -> None:
    (tmp_path / "0000.seg").write_bytes(b"another format")
    writer = SegmentWriter(tmp_path)
    (ref,) = write(writer, "e1.t1")
    asyncio.run(writer.close())
    with pytest.raises(ConfigError):
        recovered(setup_of(tmp_path, ("e1", 0)))
    setup = setup_of(tmp_path, ("e1", 0), told=ref, turns=[ref])
    assert recovered(setup) == {"e1": (["e1.t1"], [])}
