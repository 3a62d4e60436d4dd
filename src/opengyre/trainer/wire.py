"""Between the records and micro-steps on the wire and the pure values of `trajectory`.

Must not know storage or sockets. Invariant: nothing is dropped in translation.
"""

from collections.abc import Sequence

from opengyre.seams.cells import MicroStep, Segment, StepCounts
from opengyre.seams.records import TokenRecord
from opengyre.trajectory.groups import Row
from opengyre.trajectory.packing import pack
from opengyre.trajectory.rows import BrokenRecordError, TurnTokens


def turn_tokens(record: TokenRecord) -> TurnTokens:
    """The pure form of one record. Raises BrokenRecordError if spans leave a token without
    the version that sampled it."""
    header = record.header
    versions: list[int] = []
    for span in header.spans:
        if span.start != len(versions) or span.end < span.start:
            raise BrokenRecordError(f"{header.turn}: span starts at {span.start} out of place")
        versions.extend([span.policy_version] * (span.end - span.start))
    return TurnTokens(
        turn=header.turn,
        attempt=header.attempt,
        parent=header.parent,
        fork_reason=header.fork_reason,
        role=header.role,
        is_committed=header.is_committed,
        num_kept_tokens=header.num_kept_tokens,
        new_prompt_ids=record.new_prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        versions=versions,
    )


def micro_step(rows: Sequence[Row], *, step: int, number: int, version: int) -> MicroStep:
    """Pack `rows` as micro-step `number` of `step`."""
    packed = pack(rows)
    segments = [
        Segment(
            execution=one.row.execution,
            group=one.row.group,
            start=one.start,
            end=one.end,
            advantage=one.row.advantage,
            num_path_tokens=one.row.num_path_tokens,
            num_execution_tokens=one.row.num_execution_tokens,
        )
        for one in packed.segments
    ]
    return MicroStep(
        step=step,
        number=number,
        version=version,
        token_ids=packed.token_ids,
        position_ids=packed.position_ids,
        mask=packed.mask,
        logprobs=packed.logprobs,
        versions=packed.versions,
        segments=segments,
    )


def execution_share(micro_step: MicroStep) -> float:
    """Sum of T_j / T_e over the segments: how many executions this micro-step stands for."""
    return sum(one.num_path_tokens / one.num_execution_tokens for one in micro_step.segments)


def add_counts(first: StepCounts, second: StepCounts) -> StepCounts:
    """Counts are additive, like the gradients beside them."""
    return StepCounts(
        num_executions=first.num_executions + second.num_executions,
        num_tokens=first.num_tokens + second.num_tokens,
        loss_sum=first.loss_sum + second.loss_sum,
        num_clipped=first.num_clipped + second.num_clipped,
        micro_steps=first.micro_steps + second.micro_steps,
    )
