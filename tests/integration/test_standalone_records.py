"""What a gateway on its own knows of its folder when it comes back."""

import asyncio
from pathlib import Path

import pytest

from opengyre.runtime.recording.standalone import KnownTurns, records_folder, records_of
from opengyre.seams.records import SegmentRef, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentWriter

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


class KilledError(Exception):
    """The end that no orderly end is."""


def record(execution: str, number: int, ended_s: float) -> TokenRecord:
    header = TurnRecord(
        turn=f"{execution}.t{number}",
        execution=execution,
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
        ref=SegmentRef(segment=-1, offset_bytes=-1, crc32=0),
        received_s=ended_s - 1,
        first_token_s=ended_s,
        ended_s=ended_s,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header, new_prompt_ids=[1], completion_ids=[2], logprobs=[-0.5], request_delta=b""
    )


def write(folder: Path, *, is_killed: bool) -> None:
    async def main() -> None:
        with records_folder(folder, MODEL) as made:
            writer = SegmentWriter(made.tokens)
            for one in [record("a", 1, 100.0), record("a", 2, 109.5), record("b", 1, 110.0)]:
                writer.append(one)
            await writer.close()
            if is_killed:
                raise KilledError

    asyncio.run(main())


def known(folder: Path) -> KnownTurns:
    with records_folder(folder, MODEL) as made:
        return records_of(made)


def unsure(turns: KnownTurns) -> dict[str, list[bool]]:
    return {name: [turn.is_unsure for turn in found] for name, found in turns.items()}


def test_the_last_answers_before_a_death_may_never_have_arrived(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        write(tmp_path / "out", is_killed=True)
    assert unsure(known(tmp_path / "out")) == {"a": [False, True], "b": [True]}


def test_after_an_end_in_order_every_answer_has_arrived(tmp_path: Path) -> None:
    write(tmp_path / "out", is_killed=False)
    assert unsure(known(tmp_path / "out")) == {"a": [False, False], "b": [False]}
