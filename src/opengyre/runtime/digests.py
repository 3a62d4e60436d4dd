"""What a micro-step was, told without its tokens.

Must not know: who ran it. Invariant: what is told of a path can be compared with what the engines
sampled (P10): places are depths of its line, not of the micro-step.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

from opengyre.seams.cells import MicroStep, TrainedPath
from opengyre.store.observations import PathDigest

Range = tuple[int, int]


def digest_of(micro_step: MicroStep, path: TrainedPath) -> PathDigest:
    ids = [token for a, b in path.pieces for token in micro_step.token_ids[a:b]]
    logprobs = [value for a, b in path.trained for value in micro_step.logprobs[a:b]]
    return PathDigest(
        execution=path.execution,
        group=path.group,
        turn=path.turn,
        num_tokens=len(ids),
        ids_crc32=crc32(array("i", ids).tobytes()),
        trained=_joined([_depths(path.pieces, one) for one in path.trained]),
        logprobs_crc32=crc32(array("f", logprobs).tobytes()),
    )


def fill_of(made: Sequence[MicroStep], budget_tokens: int) -> float | None:
    """Mean share of the budget that micro-steps with tokens used; over 1 with a path longer
    than it. None if there was none."""
    sizes = [len(one.token_ids) for one in made if one.token_ids]
    return sum(sizes) / (len(sizes) * budget_tokens) if sizes else None


def _depths(pieces: Sequence[Range], trained: Range) -> Range:
    """The depths of a flat range that lies in one of `pieces`."""
    before = 0
    for low, high in pieces:
        if low <= trained[0] < high:
            return (before + trained[0] - low, before + trained[1] - low)
        before += high - low
    raise ValueError(f"{trained} lies outside of {pieces}")


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Neighbours in one."""
    joined: list[Range] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
