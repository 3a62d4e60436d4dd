"""A small whole run, written by hand: a journal and its token segments.

Two cells and a standalone engine, B 2, N 2, mu 1: the core and then cell 1 leave for training,
one mid-batch join, a move and a publication across a live request, a retained core, evaluations.
"""

import asyncio
import itertools
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import CommandId, EngineId, GroupId, execution_id, group_id
from opengyre.seams.kv import HandoffStage
from opengyre.seams.records import SegmentRef, Span, TokenRecord, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.codec import JournalValue, kind_of
from opengyre.store.journal import Row
from opengyre.store.segments import SegmentWriter

NOWHERE = SegmentRef(segment=-1, offset_bytes=-1, crc32=0)
LOGPROBS = [-0.5 * n for n in range(6)]
C0, C1, S0 = EngineId("c0"), EngineId("c1"), EngineId("s0")


class Tape:
    """Collects rows; each advances the time by 0.1 s."""

    def __init__(self, tokens: Path, write: "Callable[[Tape], None] | None" = None) -> None:
        self._write = write_rows if write is None else write
        self.rows: list[Row] = []
        self.paths: dict[str, seen.PathDigest] = {}
        self.rewards: dict[str, float | None] = {}
        self._tokens = tokens
        self._writer: SegmentWriter | None = None
        self._num_commands = 0
        self._ids: dict[str, list[int]] = {}

    def write_all(self) -> None:
        async def write() -> None:
            self._writer = SegmentWriter(self._tokens)
            self._write(self)
            await self._writer.close()

        asyncio.run(write())

    def tell(self, value: JournalValue) -> None:
        seq = len(self.rows) + 1
        self.rows.append(Row(seq=seq, now_s=seq * 0.1, kind=kind_of(value), value=value))

    def plan(self, *commands: tuple[type[c.Command], dict[str, Any]]) -> list[CommandId]:
        made: list[Any] = []
        for kind, fields in commands:
            self._num_commands += 1
            command_id = CommandId(self._num_commands)
            made.append(kind(command_id=command_id, reason="as written", **fields))
        self.tell(c.Plan(commands=tuple(made)))
        return [one.command_id for one in made]

    def do(self, kind: type[c.Command], **fields: Any) -> None:
        """A plan of one command, and that it was applied."""
        (command_id,) = self.plan((kind, fields))
        self.tell(f.CommandApplied(command_id=command_id))

    def turn(
        self,
        name: str,
        *,
        parent: str = "",
        cuts: tuple[int, ...] = (),
        engine: str = "s0",
        last_version: int = 0,
    ) -> None:
        """A turn of 3 new prompt ids and 6 sampled ones, cut at each of `cuts`."""
        number = int(name[1:7]) * 100 + int(name.partition(".t")[2]) * 10
        prompt, completion = [number, number + 1, number + 2], [number + n for n in range(3, 9)]
        edges = [0, *cuts, 6]
        spans = [
            Span(
                start=start,
                end=end,
                policy_version=last_version if end == 6 else 0,
                engine=engine if n == 0 else "s0",
            )
            for n, (start, end) in enumerate(itertools.pairwise(edges))
        ]
        now_s = len(self.rows) * 0.1
        kept = self._ids.get(parent, [])
        fields: dict[str, Any] = {
            "turn": name,
            "execution": name.partition(".")[0],
            "attempt": 1,
            "parent": parent,
            "fork_reason": "",
            "role": "main",
            "num_kept_tokens": len(kept),
            "num_new_prompt_tokens": 3,
            "num_completion_tokens": 6,
            "spans": spans,
            "finish": "stop",
            "is_committed": True,
            "received_s": now_s - 0.3,
            "first_token_s": now_s - 0.2,
            "ended_s": now_s,
            "held_s": 0.0,
            "num_continuations": len(cuts),
        }
        self.append(
            TokenRecord(
                header=TurnRecord(ref=NOWHERE, **fields),
                new_prompt_ids=prompt,
                completion_ids=completion,
                logprobs=LOGPROBS,
                request_delta=b"{}",
            )
        )
        self._ids[name] = [*kept, *prompt, *completion]
        self._remember_path(name, parent)

    def append(self, record: TokenRecord) -> None:
        """Write a record and tell of it."""
        assert self._writer is not None
        ref = self._writer.append(record)
        self.tell(seen.TurnRecorded(turn=msgspec.structs.replace(record.header, ref=ref)))

    def _remember_path(self, name: str, parent: str) -> None:
        """What training this turn and the one before would be told as."""
        ids, before = self._ids[name], self.paths.get(parent)
        trained = [*(before.trained if before else []), (len(ids) - 6, len(ids))]
        self.paths[name] = seen.PathDigest(
            execution=name.partition(".")[0],
            group="",
            turn=name,
            num_tokens=len(ids),
            ids_crc32=zlib.crc32(array("i", ids).tobytes()),
            trained=trained,
            logprobs_crc32=zlib.crc32(array("f", LOGPROBS * len(trained)).tobytes()),
        )

    def close(self, number: int, reward: float | None = 0.5) -> None:
        execution = execution_id(number)
        self.rewards[execution] = reward
        self.tell(f.ExecutionClosed(execution=execution, outcome=f.Outcome.COMPLETED))
        self.tell(
            f.VerdictGiven(execution=execution, reward=reward, reason="", num_trainable_tokens=6)
        )

    def accounts(self, groups: Sequence[GroupId]) -> list[seen.MemberAccount]:
        """All that was sampled is trained."""
        members = [execution_id(int(group[1:]) + n) for group in groups for n in (0, 1)]
        sampled = {one: 6 * sum(name.startswith(one) for name in self.paths) for one in members}
        return [
            seen.MemberAccount(
                execution=one,
                reward=self.rewards[one],
                shaped=self.rewards[one],
                advantage=0.5,
                sampled=sampled[one],
                trained=sampled[one],
            )
            for one in members
        ]

    def micro_step(self, step: int, number: int, cell: int, group: int, *turns: str) -> None:
        self.tell(
            seen.MicroStepDone(
                step=step,
                number=number,
                cell=cell,
                groups=[group_id(group)],
                num_tokens=18,
                run_s=0.05,
                paths=[self.paths[turn] for turn in turns],
            )
        )


def started() -> seen.RunStarted:
    return seen.RunStarted(
        version="0.1.0",
        seed=7,
        engines=[
            seen.EngineSlots(engine="c0", cell=0, slots=2),
            seen.EngineSlots(engine="c1", cell=1, slots=2),
            seen.EngineSlots(engine="s0", cell=None, slots=4),
        ],
        num_steps=2,
        steps_per_burst=1,
        groups_per_step=2,
        executions_per_group=2,
        min_valid_members=1,
        supply_fraction=0.5,
        scheduler={},
    )


def dispatch(burst: int, first: int) -> tuple[type[c.Command], dict[str, Any]]:
    """Two groups of two executions, numbered from `first`."""
    groups = tuple(
        (group_id(first + n), (execution_id(first + n), execution_id(first + n + 1)))
        for n in (0, 2)
    )
    return c.DispatchGroups, {"groups": groups, "version": burst, "burst": burst}


def write_rows(tape: Tape) -> None:
    tape.tell(started())
    for engine in (C0, C1, S0):
        tape.tell(f.EngineReady(engine=engine, incarnation=1, version=0))
        tape.do(c.OpenDoor, engine=engine)
    tape.do(c.Expose, version=0)
    evals = (execution_id(5),)
    tape.plan(dispatch(0, 1), (c.DispatchEval, {"executions": evals, "version": 0, "burst": 0}))
    for number, engine in ((1, C0), (2, C0), (3, C1), (4, S0), (5, S0)):
        execution = execution_id(number)
        tape.do(c.Launch, execution=execution, engine=engine)
        group = None if number == 5 else group_id(1 if number < 3 else 3)
        tape.tell(
            seen.LaunchRecorded(
                execution=execution, task=f"trail-{number}", group=group, launch_number=1
            )
        )
    tape.tell(counts(5, 5, 0, 8))
    tape.turn("e000001.t0", engine="c0")
    tape.turn("e000001.t1", parent="e000001.t0", engine="c0")
    tape.close(1, 1.0)
    leave(tape, 0, ((execution_id(2), S0),))
    handed_over(tape, HandoffStage.OFFERED, HandoffStage.ACKNOWLEDGED)
    tape.tell(
        seen.Continued(
            execution="e000002",
            turn="e000002.t0",
            attempt=1,
            from_engine="c0",
            to_engine="s0",
            reason="move",
            num_tokens_so_far=2,
        )
    )
    handed_over(tape, HandoffStage.TAKEN_OVER, HandoffStage.RELEASED)
    tape.turn("e000002.t0", engine="c0", cuts=(2,))
    tape.close(2, 0.0)
    first_step(tape)
    first_boundary(tape)
    second_burst(tape)


def handed_over(tape: Tape, *stages: HandoffStage) -> None:
    """Of the prefix that moves with e000002.t0."""
    for stage in stages:
        tape.tell(
            seen.Handoff(
                ref="c0#1.kv1",
                stage=stage,
                execution="e000002",
                turn="e000002.t0",
                attempt=1,
                from_engine="c0",
                to_engine="s0",
                version=0,
                num_tokens=5,
                num_bytes=500,
                read_s=0.25 if stage is HandoffStage.ACKNOWLEDGED else 0.0,
                reason="released" if stage is HandoffStage.RELEASED else "",
            )
        )


def first_step(tape: Tape) -> None:
    tape.do(c.OpenStep, step=0, version=0)
    tape.do(c.Offer, step=0, groups=(group_id(1),))
    tape.tell(f.GroupAssigned(group=group_id(1), step=0))
    tape.micro_step(0, 0, 0, 1, "e000001.t1")
    tape.turn("e000003.t0", engine="c1")
    tape.close(3, 0.25)
    leave(tape, 1, ())
    tape.do(c.Admit, step=0, cell=1)
    tape.tell(f.MemberAdmitted(step=0, cell=1))
    tape.tell(seen.MemberJoined(step=0, cell=1, is_mid_batch=True, pull_s=0.01))
    tape.micro_step(0, 1, 1, 1, "e000002.t0")
    tape.turn("e000004.t0")
    tape.close(4, 0.75)
    tape.tell(f.GroupAssigned(group=group_id(3), step=0))
    tape.micro_step(0, 2, 1, 3, "e000003.t0", "e000004.t0")
    tape.do(c.CloseStep, step=0, num_groups=2)
    finish_step(tape, 0, [group_id(1), group_id(3)], [0, 1, 2])
    tape.tell(f.StepCommitted(step=0, version=1))


def first_boundary(tape: Tape) -> None:
    tape.do(c.Checkpoint, step=0, version=1)
    tape.do(c.Expose, version=1)
    leaving, publishing, _ = tape.plan(
        (c.LeaveTraining, {"cell": 1, "version": 1}),
        (c.Publish, {"engine": S0, "version": 1}),
        dispatch(1, 6),
    )
    tape.tell(
        seen.Continued(
            execution="e000005",
            turn="e000005.t0",
            attempt=1,
            from_engine="s0",
            to_engine="s0",
            reason="frozen",
            num_tokens_so_far=4,
        )
    )
    tape.tell(
        seen.VersionPublished(engine="s0", version=1, checksum=9, held_s=0.02, num_continued=1)
    )
    tape.tell(f.CommandApplied(command_id=publishing))
    tape.tell(f.CommandApplied(command_id=leaving))
    tape.do(c.OpenDoor, engine=C1)
    tape.turn("e000005.t0", cuts=(4,), last_version=1)
    tape.close(5, 0.25)
    tape.tell(seen.EvalResult(burst=0, version=0, rewards=[0.25]))


def second_burst(tape: Tape) -> None:
    for number in range(6, 10):
        tape.do(c.Launch, execution=execution_id(number), engine=S0 if number < 8 else C1)
    for number in range(6, 10):
        tape.turn(f"e{number:06d}.t0", engine="s0" if number < 8 else "c1")
        tape.close(number, 0.75 if number % 2 else 1.0)
    tape.do(c.OpenStep, step=1, version=1)
    for number in (6, 8):
        tape.tell(f.GroupAssigned(group=group_id(number), step=1))
    tape.micro_step(1, 0, 0, 6, "e000006.t0", "e000007.t0")
    tape.micro_step(1, 1, 0, 8, "e000008.t0", "e000009.t0")
    tape.do(c.CloseStep, step=1, num_groups=2)
    finish_step(tape, 1, [group_id(6), group_id(8)], [0, 1])
    tape.tell(f.StepCommitted(step=1, version=2))
    tape.do(c.Checkpoint, step=1, version=2)
    tape.do(c.Expose, version=2)
    ids = tape.plan(
        (c.LeaveTraining, {"cell": 0, "version": 2}),
        (c.Publish, {"engine": S0, "version": 2}),
        (c.DispatchEval, {"executions": (execution_id(10),), "version": 2, "burst": 2}),
    )
    for command_id in ids:
        tape.tell(f.CommandApplied(command_id=command_id))
    tape.do(c.OpenDoor, engine=C0)
    tape.do(c.Launch, execution=execution_id(10), engine=S0)
    tape.turn("e000010.t0")
    tape.close(10, 0.75)
    tape.tell(seen.EvalResult(burst=2, version=2, rewards=[0.75]))
    tape.plan((c.EndRun, {"failed": False}))
    tape.tell(seen.RunEnded(is_failed=False, reason="all steps are done", wall_s=12.5))


def counts(d: int, p: int, done: int, slots: int) -> seen.SchedulerCounts:
    return seen.SchedulerCounts(
        num_dispatched=d, num_launched=p, num_finished=done, capacity_slots=slots
    )


def leave(tape: Tape, cell: int, moves: tuple[tuple[Any, EngineId], ...]) -> None:
    engine = (C0, C1)[cell]
    tape.do(c.CloseDoor, engine=engine)
    tape.do(c.Reroute, moves=moves)
    tape.do(c.Freeze, engine=engine)
    tape.do(c.EnterTraining, cell=cell)


def finish_step(tape: Tape, step: int, groups: list[GroupId], micro_steps: list[int]) -> None:
    now_s = len(tape.rows) * 0.1
    members = tape.accounts(groups)
    mean = fmean(one.reward for one in members if one.reward is not None)
    tape.tell(
        seen.StepReport(
            step=step,
            version_before=step,
            version_after=step + 1,
            groups=list(groups),
            micro_steps=micro_steps,
            num_executions=4.0,
            num_tokens=30,
            loss=0.1 * (step + 1),
            grad_norm=0.5,
            is_applied=True,
            is_short=False,
            mean_reward=mean,
            mean_shaped=mean,
            watched_share=0.0,
            members=members,
            num_flat_tokens=54,
            num_repeated_tokens=54,
            fill=0.5,
            opened_s=now_s - 1.0,
            closed_s=now_s,
        )
    )


def record(tokens: Path) -> Tape:
    """The whole run; its segments are in `tokens`."""
    tape = Tape(tokens)
    tape.write_all()
    return tape
