"""Token records come back exactly, and damage is told apart from a torn tail."""

import asyncio
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store.segments import Damage, SegmentReader, SegmentWriter, segment_numbers

NOWHERE = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
LOGPROB = st.floats(width=32, max_value=0.0, allow_nan=False, allow_infinity=False)


def record(
    prompt: list[int],
    sampled: list[tuple[int, float]],
    delta: bytes = b"",
    name: str = "e000001.t0",
) -> TokenRecord:
    header = TurnRecord(
        turn=name,
        execution=name.partition(".")[0],
        attempt=1,
        parent="",
        fork_reason="",
        role="main",
        num_kept_tokens=0,
        num_new_prompt_tokens=len(prompt),
        num_completion_tokens=len(sampled),
        spans=[Span(start=0, end=len(sampled), policy_version=3, engine="c1")],
        finish="stop",
        is_committed=True,
        ref=NOWHERE,
        received_s=0.1,
        first_token_s=0.2,
        ended_s=0.30000000000000004,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=prompt,
        completion_ids=[one for one, _ in sampled],
        logprobs=[one for _, one in sampled],
        request_delta=delta,
    )


def at(one: TokenRecord, ref: SegmentRef) -> TokenRecord:
    return msgspec.structs.replace(one, header=msgspec.structs.replace(one.header, ref=ref))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            record,
            IDS,
            st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROB), max_size=20),
            st.binary(max_size=30),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_records_read_back_exactly_by_reference_and_by_scan(
    tmp_path: Path, records: list[TokenRecord]
) -> None:
    async def scenario() -> None:
        writer = SegmentWriter(tmp_path)
        refs = [writer.append(one) for one in records]
        await writer.close()
        reader = SegmentReader(tmp_path)
        told = [at(one, ref) for one, ref in zip(records, refs, strict=True)]
        assert [reader.read(ref) for ref in refs] == told
        assert list(reader.scan(segment_numbers(tmp_path)[-1])) == told
        headers = list(reader.scan_headers(segment_numbers(tmp_path)[-1]))
        assert headers == [one.header for one in told]

    asyncio.run(scenario())


def test_logprobs_are_stored_as_the_nearest_float32(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = SegmentWriter(tmp_path)
        ref = writer.append(record([1], [(2, -0.1)]))
        await writer.close()
        (back,) = SegmentReader(tmp_path).read(ref).logprobs
        assert back == struct.unpack("<f", struct.pack("<f", -0.1))[0]
        assert back != -0.1

    asyncio.run(scenario())


def test_files_rotate_and_a_new_writer_never_touches_an_old_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = SegmentWriter(tmp_path, rotate_bytes=600)
        refs = [writer.append(record([n], [(n, -1.0)])) for n in range(6)]
        await writer.sync()
        assert {ref.segment for ref in refs} == {0, 1, 2}
        await writer.close()
        old = (tmp_path / "0002.seg").read_bytes()
        again = SegmentWriter(tmp_path)
        ref = again.append(record([9], []))
        await again.close()
        assert ref.segment == 3
        assert (tmp_path / "0002.seg").read_bytes() == old
        ids = [SegmentReader(tmp_path).read(one).new_prompt_ids for one in [*refs, ref]]
        assert ids == [[n] for n in [0, 1, 2, 3, 4, 5, 9]]

    asyncio.run(scenario())


def test_a_torn_tail_hides_only_the_record_it_tore_at_every_length(tmp_path: Path) -> None:
    async def scenario() -> list[SegmentRef]:
        writer = SegmentWriter(tmp_path)
        refs = [writer.append(record([n] * 5, [(n, -1.0)], b"xyz")) for n in range(2)]
        await writer.close()
        return refs

    refs = asyncio.run(scenario())
    path, reader = tmp_path / "0000.seg", SegmentReader(tmp_path)
    whole = path.read_bytes()
    for size in range(refs[1].offset_bytes, len(whole)):
        path.write_bytes(whole[:size])
        assert [one.header.ref for one in reader.scan(0)] == refs[:1]
        with pytest.raises(BoundaryError, match="torn or damaged"):
            reader.read(refs[1])


def test_one_flipped_bit_anywhere_in_a_record_is_found(tmp_path: Path) -> None:
    async def scenario() -> SegmentRef:
        writer = SegmentWriter(tmp_path)
        ref = writer.append(record([7, 8], [(9, -1.0)]))
        await writer.close()
        return ref

    ref = asyncio.run(scenario())
    path, reader = tmp_path / "0000.seg", SegmentReader(tmp_path)
    whole = path.read_bytes()
    for place in range(ref.offset_bytes, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(BoundaryError, match="damaged record"):
            reader.read(ref)


@pytest.mark.parametrize("place", [0, 1, 5, 30, 150, -1])
def test_a_damaged_record_hides_only_itself_and_is_told(tmp_path: Path, place: int) -> None:
    async def scenario() -> list[SegmentRef]:
        writer = SegmentWriter(tmp_path)
        delta = b'about {"turn":"e000001.t9"}'
        refs = [writer.append(record([n] * 5, [(n, -1.0)], delta)) for n in range(4)]
        await writer.close()
        return refs

    refs = asyncio.run(scenario())
    path, reader = tmp_path / "0000.seg", SegmentReader(tmp_path)
    whole = bytearray(path.read_bytes())
    first, after = refs[1].offset_bytes, refs[2].offset_bytes
    whole[first + place % (after - first)] ^= 64
    path.write_bytes(whole[:-3])
    told: list[Damage] = []
    found = [one.header.ref for one in reader.scan(0, on_damage=told.append)]
    assert found == [refs[0], refs[2]]
    assert [(one.offset_bytes, one.is_at_end) for one in told] == [
        (first, False),
        (refs[3].offset_bytes, True),
    ]
    assert [one.num_bytes for one in told] == [after - first, len(whole) - 3 - refs[3].offset_bytes]
    assert str(told[0]) == f"segment 0 at {first}: a damaged record of {after - first} bytes"


def test_a_reference_to_another_record_a_missing_file_and_a_foreign_one_are_refused(
    tmp_path: Path,
) -> None:
    async def scenario() -> list[SegmentRef]:
        writer = SegmentWriter(tmp_path)
        refs = [writer.append(record([n], [])) for n in (1, 2)]
        await writer.close()
        return refs

    one, two = asyncio.run(scenario())
    reader = SegmentReader(tmp_path)
    with pytest.raises(BoundaryError, match="another record than the one that was told"):
        reader.read(msgspec.structs.replace(one, crc32=two.crc32))
    with pytest.raises(BoundaryError, match="segment 5: No such file"):
        reader.read(msgspec.structs.replace(one, segment=5))
    (tmp_path / "0001.seg").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="not a token segment"):
        list(reader.scan(1))


def test_a_record_whose_counts_differ_from_its_header_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = SegmentWriter(tmp_path)
        good = record([1], [(2, -1.0)])
        with pytest.raises(BoundaryError, match=r"e000001\.t0: header tells"):
            writer.append(msgspec.structs.replace(good, logprobs=[]))
        await writer.close()

    asyncio.run(scenario())


def test_concurrent_syncs_all_return_with_everything_covered(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = SegmentWriter(tmp_path, rotate_bytes=300)

        async def turn(number: int) -> SegmentRef:
            ref = writer.append(record([number], [(number, -1.0)]))
            await writer.sync()
            return ref

        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(turn(n)) for n in range(20)]
        reader = SegmentReader(tmp_path)
        ids = [reader.read(one.result()).new_prompt_ids for one in turns]
        assert ids == [[n] for n in range(20)]
        await writer.close()

    asyncio.run(scenario())
