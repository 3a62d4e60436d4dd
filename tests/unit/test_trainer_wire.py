from dataclasses import replace

import msgspec

from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.trainer.wire import add_counts, execution_share
from tests.training_rows import line_row, micro_step_of


def test_a_micro_step_survives_the_wire_and_knows_its_share_of_executions() -> None:
    row = replace(line_row("e", 3), num_execution_tokens=8)
    made = micro_step_of(row, row, step=3, number=7, version=2)
    assert execution_share(made) == 0.5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=MicroStep) == made


def test_counts_add_like_gradients() -> None:
    one = StepCounts(num_executions=0.5, num_tokens=3, loss_sum=1.0, micro_steps=[1])
    two = StepCounts(num_executions=1.5, num_tokens=4, num_clipped=2, micro_steps=[0, 2])
    assert add_counts(one, two) == StepCounts(
        num_executions=2.0, num_tokens=7, loss_sum=1.0, num_clipped=2, micro_steps=[1, 0, 2]
    )
