"""A small whole run whose first execution has every kind of fork, trained by the real processor.

Group 1: e000001 (launched twice; side call, sub-agent, a retried call, summary and compaction) and
e000002 (one turn). Group 3: two executions without a verdict, void. e000005 is an evaluation.
"""

import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorded_run import C0, NOWHERE, S0, Tape

from opengyre.control import commands as c
from opengyre.control import facts as f
from opengyre.control.ids import execution_id, group_id
from opengyre.seams.records import Span, TokenRecord, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.trees import tree_of
from opengyre.trajectory.advantages import Baseline
from opengyre.trajectory.bundles import Layout, Row
from opengyre.trajectory.groups import GroupSettings, Member, Settled, rows_of_group
from opengyre.trajectory.selection import SelectionSettings
from opengyre.trajectory.tree import line_ids
from opengyre.trajectory.turns import ForkReason, Role

MAX_PATHS = 2


class TreeTape(Tape):
    """`records` of each execution in the order in which they were made; `first` calls those of
    e000001, of which the first `num_given_up` are of a launch that was given up."""

    def __init__(
        self,
        tokens: Path,
        first: "Callable[[TreeTape], None] | None" = None,
        *,
        is_trained: bool = True,
    ) -> None:
        super().__init__(tokens, _write_rows)
        self.is_trained = is_trained
        self.first = first_execution if first is None else first
        self.records: dict[str, list[TokenRecord]] = {}
        self.num_given_up = 0

    def call(
        self,
        name: str,
        *,
        parent: str = "",
        kept: int = 0,
        sizes: tuple[int, int] = (20, 10),
        role: Role = Role.MAIN,
        **fields: Any,
    ) -> None:
        """A turn that keeps `kept` tokens of `parent`, with `sizes` injected and sampled ones; ids
        are different in each."""
        injected, sampled = sizes
        execution = name.partition(".")[0]
        base = 1000 * (1 + sum(map(len, self.records.values())))
        told: dict[str, Any] = {
            "attempt": 0,
            "fork_reason": "",
            "is_committed": True,
            "finish": "stop",
            "spans": [Span(start=0, end=sampled, policy_version=0, engine="s0")],
            **fields,
        }
        now_s = len(self.rows) * 0.1
        header = TurnRecord(
            turn=name,
            execution=execution,
            parent=parent,
            role=role.value,
            num_kept_tokens=kept,
            num_new_prompt_tokens=injected,
            num_completion_tokens=sampled,
            ref=NOWHERE,
            received_s=now_s - 0.2,
            first_token_s=now_s - 0.1,
            ended_s=now_s,
            held_s=0.0,
            num_continuations=0,
            **told,
        )
        record = TokenRecord(
            header=header,
            new_prompt_ids=list(range(base, base + injected)),
            completion_ids=list(range(base + 500, base + 500 + sampled)),
            logprobs=[-0.25 * (n % 7) for n in range(sampled)],
            request_delta=b"{}",
        )
        self.add(record)

    def add(self, record: TokenRecord) -> None:
        self.records.setdefault(record.header.execution, []).append(record)
        self.append(record)


def record_tree(tokens: Path) -> TreeTape:
    tape = TreeTape(tokens)
    tape.write_all()
    return tape


def _write_rows(tape: Tape) -> None:
    assert isinstance(tape, TreeTape)
    tape.tell(_started())
    for engine in (C0, S0):
        tape.tell(f.EngineReady(engine=engine, incarnation=1, version=0))
        tape.do(c.OpenDoor, engine=engine)
    tape.do(c.Expose, version=0)
    groups = tuple((group_id(n), (execution_id(n), execution_id(n + 1))) for n in (1, 3))
    tape.plan(
        (c.DispatchGroups, {"groups": groups, "version": 0, "burst": 0}),
        (c.DispatchEval, {"executions": (execution_id(5),), "version": 0, "burst": 0}),
    )
    for number in range(1, 6):
        tape.do(c.Launch, execution=execution_id(number), engine=S0)
        launch(tape, number, 1)
    tape.first(tape)
    tape.close(1, 1.0)
    tape.call("e000002.t1")
    tape.close(2, 0.0)
    for number in (3, 4):
        tape.call(f"e{number:06d}.t1")
        tape.close(number, None)
    tape.call("e000005.t1")
    tape.close(5, 0.5)
    tape.tell(seen.EvalResult(burst=0, version=0, rewards=[0.5]))
    if tape.is_trained:
        train(tape)
    tape.plan((c.EndRun, {"failed": False}))
    tape.tell(seen.RunEnded(is_failed=False, reason="all steps are done", wall_s=9.0))


def first_execution(tape: TreeTape) -> None:
    tape.call("e000001.t1")
    tape.num_given_up = 1
    launch(tape, 1, 2)
    root = {"fork_reason": ForkReason.NEW_ROOT.value}
    tape.call("e000001.t2", sizes=(40, 10))
    tape.call("e000001.t3", sizes=(8, 4), role=Role.SIDE, **root)
    tape.call("e000001.t4", parent="e000001.t2", kept=50)
    tape.call("e000001.t5", sizes=(30, 10), role=Role.SUB_AGENT, **root)
    tape.call("e000001.t6", parent="e000001.t5", kept=40, role=Role.SUB_AGENT)
    cut = {"is_committed": False, "finish": "cancelled"}
    tape.call("e000001.t7", parent="e000001.t4", kept=80, sizes=(20, 3), **cut)
    tape.call("e000001.t7", parent="e000001.t4", kept=80, attempt=1)
    tape.call("e000001.t8", parent="e000001.t7", kept=110, role=Role.MAIN_SUMMARY)
    tape.call("e000001.t9", parent="e000001.t2", kept=25, **root)
    spans = [
        Span(start=0, end=6, policy_version=0, engine="s0"),
        Span(start=6, end=10, policy_version=1, engine="c0"),
    ]
    tape.call("e000001.t10", parent="e000001.t9", kept=55, spans=spans)


def train(tape: TreeTape) -> None:
    """One step that consumes group 1."""
    members = []
    for number, given_up in ((1, tape.num_given_up), (2, 0)):
        name = execution_id(number)
        records = tape.records[name]
        tree = tree_of(records[given_up:], given_up=records[:given_up])
        members.append(Member(execution=name, tree=tree, reward=tape.rewards[name], seed=number))
    settings = GroupSettings(
        selection=SelectionSettings(max_paths=MAX_PATHS),
        baseline=Baseline.MEAN_STD,
        eps=1e-6,
        layout=Layout.TREE,
        budget_tokens=4096,
    )
    trained = rows_of_group(group_id(1), members, settings=settings)
    tape.do(c.EnterTraining, cell=0)
    tape.do(c.OpenStep, step=0, version=0)
    tape.do(c.Offer, step=0, groups=(group_id(1),))
    tape.tell(f.GroupAssigned(group=group_id(1), step=0))
    tape.tell(
        seen.MicroStepDone(
            step=0,
            number=0,
            cell=0,
            groups=[group_id(1)],
            num_tokens=40,
            run_s=0.05,
            paths=[digest(row) for row in trained.rows],
        )
    )
    tape.do(c.CloseStep, step=0, num_groups=1)
    tape.tell(_report(tape, trained.members))
    tape.tell(f.StepCommitted(step=0, version=1))


def digest(row: Row) -> seen.PathDigest:
    logprobs = array("f")
    for begin, end in row.path.trained:
        (node,) = [one.node for one in row.path.pieces if one.begin <= begin < one.end]
        here = slice(begin - node.sampled_begin, end - node.sampled_begin)
        logprobs.extend(node.logprobs[here].tolist())
    return seen.PathDigest(
        execution=row.execution,
        group=row.group,
        turn=row.path.leaf.turn,
        num_tokens=row.path.num_tokens,
        ids_crc32=zlib.crc32(line_ids(row.path.leaf).tobytes()),
        trained=list(row.path.trained),
        logprobs_crc32=zlib.crc32(logprobs.tobytes()),
    )


def launch(tape: Tape, number: int, launch_number: int) -> None:
    group = None if number == 5 else group_id(1 if number < 3 else 3)
    tape.tell(
        seen.LaunchRecorded(
            execution=execution_id(number),
            task=f"trail-{number}",
            group=group,
            launch_number=launch_number,
        )
    )


def _report(tape: TreeTape, settled: tuple[Settled, ...]) -> seen.StepReport:
    now_s = len(tape.rows) * 0.1
    return seen.StepReport(
        step=0,
        version_before=0,
        version_after=1,
        groups=[group_id(1)],
        micro_steps=[0],
        num_executions=2.0,
        num_tokens=sum(one.account.trained for one in settled),
        loss=0.1,
        grad_norm=0.5,
        is_applied=True,
        is_short=False,
        mean_reward=0.5,
        mean_shaped=0.5,
        watched_share=1.0,
        num_flat_tokens=180,
        num_repeated_tokens=240,
        fill=0.25,
        opened_s=now_s - 1.0,
        closed_s=now_s,
        members=[
            seen.MemberAccount(
                execution=one.execution,
                reward=tape.rewards[one.execution],
                shaped=one.reward,
                advantage=one.advantage,
                sampled=one.account.sampled,
                trained=one.account.trained,
                masked=dict(one.account.masked),
                dropped=dict(one.account.dropped),
            )
            for one in settled
        ],
    )


def _started() -> seen.RunStarted:
    return seen.RunStarted(
        version="0.1.0",
        seed=7,
        engines=[
            seen.EngineSlots(engine="c0", cell=0, slots=4),
            seen.EngineSlots(engine="s0", cell=None, slots=8),
        ],
        num_steps=1,
        steps_per_burst=1,
        groups_per_step=1,
        executions_per_group=2,
        min_valid_members=1,
        supply_fraction=0.5,
        scheduler={},
    )
