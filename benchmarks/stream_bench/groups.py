"""Groups to train: bundles of given sizes, and recorded executions on disk.

Owns: their sizes. Must not know streams. Invariant: the same numbers give the same groups.
"""

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from opengyre.config.training import TrainingConfig
from opengyre.runtime.book import Book
from opengyre.runtime.trained_groups import TrainedGroups
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.seams.tasks import Task
from opengyre.store.segments import SegmentReader, SegmentWriter
from opengyre.trajectory.bundles import Bundle, Row
from opengyre.trajectory.selection import SelectionSettings, select
from opengyre.trajectory.tree import Tree
from opengyre.trajectory.turns import ForkReason, Role, SampledSpan, TurnTokens

Groups = dict[str, list[Bundle]]


def groups_of(sizes: list[list[int]]) -> Groups:
    """One bundle of one path for each of `sizes` in tokens."""
    return {
        f"g{number:05d}": [
            _bundle(f"g{number:05d}", f"e{number:03d}{k:03d}", size) for k, size in enumerate(group)
        ]
        for number, group in enumerate(sizes)
    }


def long_tailed_sizes(
    num_groups: int, *, num_members: int, median_tokens: int, seed: int
) -> list[list[int]]:
    """Log-normal, sigma 0.8: the largest of 128 is about seven times the median."""
    drawn = np.random.default_rng(seed).lognormal(
        np.log(median_tokens), 0.8, (num_groups, num_members)
    )
    return [[max(2, int(size)) for size in group] for group in drawn]


@cache
def _row(num_tokens: int) -> Row:
    tree = Tree()
    tree.insert(
        TurnTokens(
            turn="e.t1",
            attempt=0,
            parent="",
            fork_reason=ForkReason.NONE,
            role=Role.MAIN,
            is_committed=True,
            num_kept_tokens=0,
            new_prompt_ids=[0],
            completion_ids=list(range(1, num_tokens)),
            logprobs=[-0.5] * (num_tokens - 1),
            spans=(SampledSpan(start=0, end=num_tokens - 1, version=0, engine="c0#1"),),
        )
    )
    settings = SelectionSettings(max_paths=1)
    (path,) = select(tree, settings=settings, rng=np.random.default_rng(0)).paths
    return Row(
        group="",
        execution="",
        path=path,
        advantage=1.0,
        num_execution_tokens=num_tokens - 1,
        is_counted_only=False,
    )


def _bundle(group: str, execution: str, num_tokens: int) -> Bundle:
    row = replace(_row(num_tokens), group=group, execution=execution)
    return Bundle(rows=(row,), cost_tokens=num_tokens)


class _OneTask:
    num_tasks = 1

    def task_for_group(self, group_index: int) -> Task:
        nowhere = Path("/")
        return Task(
            name="one",
            folder=nowhere,
            instruction="",
            workspace=None,
            tests=nowhere,
            content_hash="",
        )


def recorded_groups(
    folder: Path, *, num_groups: int, num_members: int, num_turns: int, turn_tokens: int
) -> TrainedGroups:
    """Executions of one line of `num_turns`, half of each turn's tokens sampled, on disk."""
    writer = SegmentWriter(folder)
    book = Book(train=_OneTask(), evaluation=None, seed=0)
    for number in range(num_groups):
        members = tuple(f"e{number * num_members + k:06d}" for k in range(num_members))
        book.add_group(f"g{number:05d}", members, burst=0, version=0)
        for reward, name in enumerate(members):
            for turn in range(1, num_turns + 1):
                made = _record(name, turn, turn_tokens)
                ref = writer.append(made)
                book.tell_turn(msgspec.structs.replace(made.header, ref=ref))
            book.executions[name].reward = float(reward)
    asyncio.run(writer.sync())
    return TrainedGroups(book, SegmentReader(folder), config=TrainingConfig())


def _record(execution: str, number: int, num_tokens: int) -> TokenRecord:
    half = num_tokens // 2
    header = TurnRecord(
        turn=f"{execution}.t{number}",
        execution=execution,
        attempt=0,
        parent=f"{execution}.t{number - 1}" if number > 1 else "",
        fork_reason="",
        role="main",
        num_kept_tokens=(number - 1) * num_tokens,
        num_new_prompt_tokens=num_tokens - half,
        num_completion_tokens=half,
        spans=[Span(start=0, end=half, policy_version=0, engine="c0")],
        finish="stop",
        is_committed=True,
        ref=SegmentRef(segment=0, offset_bytes=0, crc32=0),
        received_s=0.0,
        first_token_s=0.0,
        ended_s=0.0,
        held_s=0.0,
        num_continuations=0,
    )
    return TokenRecord(
        header=header,
        new_prompt_ids=list(range(num_tokens - half)),
        completion_ids=list(range(half)),
        logprobs=[-0.5] * half,
        request_delta=b"",
    )
