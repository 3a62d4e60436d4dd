"""Made-up executions with every way to branch, trained by the processor, are verified and shown."""

import zlib
from array import array
from collections import Counter
from pathlib import Path

import pytest
from recorded_run import NOWHERE
from recorded_tree import TreeTape, launch

from opengyre.seams.records import Span, TokenRecord, TurnRecord
from opengyre.store.segments import SegmentReader
from opengyre.trajectory.account import DROPPING
from opengyre.trajectory.turns import TurnTokens
from opengyre.views.restored import Lines
from opengyre.views.trees import open_trees
from opengyre.views.verify import verify_rows
from tests.unit.trajectory_worlds import World, ends_of, made_world

SEEDS = range(30)


def record_of(turn: TurnTokens) -> TokenRecord:
    def named(name: str) -> str:
        return name.replace("e1.", "e000001.")

    header = TurnRecord(
        turn=named(turn.turn),
        execution="e000001",
        attempt=turn.attempt,
        parent=named(turn.parent),
        parent_attempt=turn.parent_attempt,
        fork_reason=turn.fork_reason.value,
        role=turn.role.value,
        num_kept_tokens=turn.num_kept_tokens,
        num_new_prompt_tokens=len(turn.new_prompt_ids),
        num_completion_tokens=len(turn.completion_ids),
        spans=[
            Span(start=one.start, end=one.end, policy_version=one.version, engine=one.engine)
            for one in turn.spans
        ],
        finish="stop",
        is_committed=turn.is_committed,
        ref=NOWHERE,
        received_s=0.0,
        first_token_s=0.1,
        ended_s=0.2,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=list(turn.new_prompt_ids),
        completion_ids=list(turn.completion_ids),
        logprobs=list(turn.logprobs),
        request_delta=b"{}",
    )


def num_given_up(world: World) -> int:
    return sum(one.record.launch < world.launch for one in world.seen)


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_are_what_each_engine_saw_and_drop_what_cannot_be_trained(seed: int) -> None:
    world = made_world(seed)
    records = [record_of(one.record) for one in world.seen]
    earlier = records[: num_given_up(world)]
    lines = Lines(max((int(one.header.turn.partition(".t")[2]) for one in earlier), default=0))
    for one, record in zip(world.seen, records, strict=True):
        line = lines.add(record)
        assert line.num_tokens == len(one.ids)
        assert line.ids_crc32 == zlib.crc32(array("i", one.ids).tobytes())
    told = Counter(reason for reason in ends_of(world.seen).values() if reason in DROPPING)
    assert lines.dropped() == told


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_processor_made_of_a_world_is_verified_and_adds_up(
    tmp_path: Path, seed: int
) -> None:
    world = made_world(seed)

    def write(tape: TreeTape) -> None:
        current = 1
        for one in world.seen:
            if one.record.launch > current:
                current = one.record.launch
                launch(tape, 1, current)
            tape.add(record_of(one.record))
        tape.num_given_up = num_given_up(world)

    tape = TreeTape(tmp_path, first=write)
    tape.write_all()
    results = verify_rows(tape.rows, SegmentReader(tmp_path))
    found = {one.promise: one.problems for one in results}
    assert [found[name] for name in ("P10", "P11", "P12")] == [(), (), ()]
    tree = open_trees(tape.rows).of("e000001")
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for end in tree.ends:
        if end.num_rest:
            (dropped if end.is_dropped else masked)[end.reason] += end.num_rest
    assert tree.problem == ""
    assert tree.account.is_balanced
    no_context = tree.account.masked.get("no_context", 0)
    assert masked.total() == sum(tree.account.masked.values())
    assert dropped == tree.account.dropped
    assert no_context or masked == tree.account.masked
