"""Between micro-steps on the wire and the pure values of `trajectory`.

Must not know storage or sockets. Invariant: nothing is dropped in translation.
"""

from collections.abc import Sequence

from opengyre.seams.cells import MicroStep, Segment, StepCounts, TrainedPath
from opengyre.trajectory.bundles import Bundle
from opengyre.trajectory.packing import PackedPath, pack


def micro_step(bundles: Sequence[Bundle], *, step: int, number: int, version: int) -> MicroStep:
    """Pack `bundles` as micro-step `number` of `step`."""
    packed = pack(bundles)
    return MicroStep(
        step=step,
        number=number,
        version=version,
        token_ids=packed.token_ids.tolist(),
        position_ids=packed.position_ids.tolist(),
        logprobs=packed.logprobs.tolist(),
        segments=[
            Segment(start=one.start, end=one.end, ancestors=list(one.ancestors))
            for one in packed.segments
        ],
        paths=[_trained_path(one) for one in packed.paths],
        num_repeated_tokens=sum(bundle.num_path_tokens for bundle in bundles),
    )


def _trained_path(packed: PackedPath) -> TrainedPath:
    row = packed.row
    return TrainedPath(
        execution=row.execution,
        group=row.group,
        turn=row.path.leaf.turn,
        pieces=list(packed.pieces),
        trained=list(packed.trained),
        advantage=row.advantage,
        num_path_tokens=row.num_path_tokens,
        num_execution_tokens=row.num_execution_tokens,
    )


def execution_share(micro_step: MicroStep) -> float:
    """Sum of T_j / T_e over the paths: how many executions this micro-step stands for."""
    return sum(one.num_path_tokens / one.num_execution_tokens for one in micro_step.paths)


def add_counts(first: StepCounts, second: StepCounts) -> StepCounts:
    """Counts are additive, like the gradients beside them."""
    return StepCounts(
        num_executions=first.num_executions + second.num_executions,
        num_tokens=first.num_tokens + second.num_tokens,
        loss_sum=first.loss_sum + second.loss_sum,
        num_clipped=first.num_clipped + second.num_clipped,
        divergence_sum=first.divergence_sum + second.divergence_sum,
        micro_steps=first.micro_steps + second.micro_steps,
        odd=first.odd or second.odd,
    )
