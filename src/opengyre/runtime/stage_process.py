"""The process of a pipeline stage after the first: carries out what its cell's lead orders.

Owns: the loop. Must not know: the controller, roles, why an order is given. Invariants: it ends
when the lead's end of the channel ends; a failure that is no refusal ends it, and so the cell.
"""

import contextlib
import logging
import socket
import sys

from opengyre.config.load import parse_resolved
from opengyre.control.errors import InvariantError
from opengyre.runtime.embedded import StageParts, open_stage
from opengyre.runtime.launcher import die_with_parent, run_and_end
from opengyre.runtime.stages import STAGE_TYPES, StageSetup
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.trainer import orders as o
from opengyre.trainer.followers import ANSWER_S
from opengyre.transport.blocking import Channel

log = logging.getLogger(__name__)


def serve(channel: Channel, parts: StageParts) -> None:
    """Until the channel ends. Raises BoundaryError when the pipeline breaks."""
    while True:
        try:
            order = channel.receive(timeout_s=None)
        except BoundaryError:
            log.info("stage %d ends with its lead", parts.desk.place.stage)
            return
        try:
            answer = _carry_out(order, parts)
        except BoundaryError as error:
            if isinstance(order, o.Serve):
                raise
            answer = o.Refused(
                boundary=error.boundary, reason=error.reason, retryable=error.retryable
            )
        channel.send(answer, timeout_s=ANSWER_S)


def _carry_out(order: o.Order, parts: StageParts) -> o.Order:
    if isinstance(order, o.Serve):
        parts.follower.serve()
        return o.Served(times=parts.follower.times)
    return parts.desk.handle(order)


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), STAGE_TYPES)
    with contextlib.closing(channel):
        setup = channel.receive(timeout_s=ANSWER_S)
        if not isinstance(setup, StageSetup):
            raise InvariantError("expected a stage's setup")
        config = parse_resolved(setup.cell.config_json)
        try:
            with open_stage(config, setup) as parts:
                channel.send(o.Did(), timeout_s=ANSWER_S)
                serve(channel, parts)
        except ConfigError as error:
            refusal = o.Refused(boundary="config", reason=str(error), retryable=False)
            channel.send(refusal, timeout_s=ANSWER_S)


if __name__ == "__main__":
    run_and_end(main)
