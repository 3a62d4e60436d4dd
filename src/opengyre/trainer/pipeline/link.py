"""What a stage says to the stages before and after it.

Owns: the messages between neighbours, their tags, and the life of send buffers.
Must not know: what is computed, when to send what.
Invariants: a send buffer lives until the protocol says that it was received: what went down with
micro-step k until the gradient of k came up, what went up for k until a header from above says that
k is finished; so as many are held as micro-steps are in flight. No wait is cut short: gloo gives a
pair up at the first time-out. So a neighbour that stands still blocks us (who holds the cell's
lease ends it), and one that dies raises BoundaryError. Every payload follows a message on
`headers`, so a death is seen there also where payloads travel by NCCL.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opengyre.control.errors import InvariantError
from opengyre.seams.errors import BoundaryError
from opengyre.trainer.pipeline import header as h
from opengyre.trainer.pipeline.groups import LOOPBACK, PATIENCE, Groups, open_groups, store_at
from opengyre.trainer.pipeline.header import Command, Header
from opengyre.trainer.pipeline.parts import Told

_HEADER, _AUX, _ACTIVATION, _GRADIENT, _TOLD = range(1, 6)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Received once `until` micro-steps are finished."""

    until: int
    works: list[Any]
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A gradient on its way up, into buffers that are posted already."""

    told_work: Any
    told: Tensor
    work: Any
    gradient: Tensor


class Link:
    """One stage's ends. Every method raises BoundaryError when the neighbour is gone."""

    def __init__(self, groups: Groups, *, stage: int, device: torch.device) -> None:
        self._open_groups: Groups | None = groups
        self._stage = stage
        self._device = device
        self._down: deque[_Sent] = deque()
        self._up: deque[_Sent] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._next_header: tuple[Tensor, Any] | None = None

    @property
    def num_held(self) -> int:
        """Messages whose buffers are held."""
        return len(self._down) + len(self._up)

    def send_run(self, sent: Tensor, *, aux: Tensor, count: int, finished: int) -> None:
        """Activations `sent` [n, T, hidden] and uint8 `aux` to the next stage."""
        sent = sent.contiguous()
        n, num_tokens, hidden = sent.shape
        header = Header(
            command=Command.RUN,
            count=count,
            finished=finished,
            num_aux_bytes=aux.numel(),
            shape=(n, num_tokens, hidden),
            dtype=sent.dtype,
        )
        ahead, groups, after = h.encode(header), self._groups, self._stage + 1
        with self._boundary(after):
            works = [
                groups.headers.send([ahead], after, _HEADER),
                groups.headers.send([aux], after, _AUX),
                groups.down.send([sent], after, _ACTIVATION),
            ]
        self._down.append(_Sent(count, works, [ahead, aux, sent]))
        self._post_gradient(torch.empty_like(sent[0]))

    def receive_gradient(self, *, count: int) -> tuple[Tensor, Told]:
        """Blocks for that of the oldest micro-step sent down, the `count`-th: its gradient
        [T, hidden] and what the last stage told. Then all that went down with it was received."""
        one = self._awaited.popleft()
        with self._boundary(self._stage + 1):
            one.told_work.wait(PATIENCE)
            self._groups.receive(one.work)
        self._release(self._down, count)
        loss_sum, num_clipped, divergence_sum = one.told.tolist()
        told = Told(loss_sum=loss_sum, num_clipped=int(num_clipped), divergence_sum=divergence_sum)
        return one.gradient, told

    def send_command(self, command: Command, *, count: int, finished: int, num_run: int) -> None:
        """To the next stage, which receives it before the micro-step after the `num_run`-th."""
        ahead = h.encode(Header(command=command, count=count, finished=finished))
        with self._boundary(self._stage + 1):
            work = self._groups.headers.send([ahead], self._stage + 1, _HEADER)
        self._down.append(_Sent(num_run + 1, [work], [ahead]))

    def await_rest(self) -> None:
        """Blocks until the next stage is at rest; then it has received all."""
        fields, work = self._post_header(self._stage + 1)
        with self._boundary(self._stage + 1):
            work.wait(PATIENCE)
        header = h.decode(fields)
        if header.command is not Command.AT_REST:
            words = f"stage {self._stage} did not expect {header.command.name}"
            raise BoundaryError("pipeline", words, retryable=False)
        self._release(self._down, header.finished + 1)

    def receive_header(self) -> Header:
        """Blocks until the stage before says something. The next header is posted at once, so that
        gloo need not ask for it first."""
        fields, work = self._next_header or self._post_header(self._stage - 1)
        with self._boundary(self._stage - 1):
            work.wait(PATIENCE)
        self._next_header = self._post_header(self._stage - 1)
        header = h.decode(fields)
        self._release(self._up, header.finished)
        return header

    def receive_run(self, header: Header) -> tuple[Tensor, Tensor]:
        """What follows a RUN: uint8 aux and activations [n, T, hidden]."""
        aux = torch.empty(header.num_aux_bytes, dtype=torch.uint8)
        received = torch.empty(header.shape, dtype=header.dtype, device=self._device)
        before = self._stage - 1
        with self._boundary(before):
            aux_work = self._groups.headers.recv([aux], before, _AUX)
            work = self._groups.down.recv([received], before, _ACTIVATION)
            aux_work.wait(PATIENCE)
            self._groups.receive(work)
        return aux, received

    def send_gradient(self, gradient: Tensor, told: Told, *, count: int) -> None:
        """Gradient [T, hidden] of the `count`-th micro-step to the stage before."""
        gradient = gradient.contiguous()
        numbers = [told.loss_sum, float(told.num_clipped), told.divergence_sum]
        numbers_sent, before = torch.tensor(numbers, dtype=torch.float64), self._stage - 1
        with self._boundary(before):
            works = [
                self._groups.headers.send([numbers_sent], before, _TOLD),
                self._groups.up.send([gradient], before, _GRADIENT),
            ]
        self._up.append(_Sent(count, works, [numbers_sent, gradient]))

    def send_rest(self, *, count: int) -> None:
        """We are at rest after `count` micro-steps. Blocks until the stage before, which waits for
        this, has it: whatever is closed next, it arrived."""
        ahead = h.encode(Header(command=Command.AT_REST, count=count, finished=count))
        with self._boundary(self._stage - 1):
            self._groups.headers.send([ahead], self._stage - 1, _HEADER).wait(PATIENCE)

    def close(self) -> None:
        """The neighbours see us gone. gloo keeps connections while anything of a group is held."""
        groups, self._open_groups = self._open_groups, None
        self._next_header = None
        for held in (self._down, self._up, self._awaited):
            held.clear()
        if groups is not None:
            groups.close()

    @property
    def _groups(self) -> Groups:
        if self._open_groups is None:
            raise InvariantError(f"the link of stage {self._stage} is closed")
        return self._open_groups

    @contextmanager
    def _boundary(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = str(error).splitlines()[0].split(". ")[0]
            words = f"stage {self._stage} lost stage {peer}: {why}"
            raise BoundaryError("pipeline", words, retryable=False) from error

    def _post_gradient(self, gradient: Tensor) -> None:
        told, after = torch.empty(3, dtype=torch.float64), self._stage + 1
        with self._boundary(after):
            told_work = self._groups.headers.recv([told], after, _TOLD)
            work = self._groups.up.recv([gradient], after, _GRADIENT)
        self._awaited.append(_Awaited(told_work, told, work, gradient))

    def _post_header(self, peer: int) -> tuple[Tensor, Any]:
        fields = torch.empty(h.NUM_FIELDS, dtype=torch.int64)
        with self._boundary(peer):
            return fields, self._groups.headers.recv([fields], peer, _HEADER)

    def _release(self, held: deque[_Sent], finished: int) -> None:
        while held and held[0].until <= finished:
            with self._boundary(self._stage + (1 if held is self._down else -1)):
                for work in held.popleft().works:
                    work.wait()


def open_link(
    store_address: str,
    *,
    name: str,
    stage: int,
    num_stages: int,
    device: str = "cpu",
    host: str = LOOPBACK,
) -> Link:
    """Blocks until all stages are there; `name` is used once on the store, `host` is the address of
    this machine that the others reach. Raises BoundaryError when they are not there in time."""
    on = torch.device(device)
    try:
        groups = open_groups(
            store_at(store_address),
            name=name,
            stage=stage,
            num_stages=num_stages,
            device=on,
            host=host,
        )
    except RuntimeError as error:
        words = f"stage {stage} of {num_stages} found no pipeline: {str(error).splitlines()[0]}"
        raise BoundaryError("pipeline", words, retryable=False) from error
    return Link(groups, stage=stage, device=on)
