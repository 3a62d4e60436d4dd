"""What the engines of this process share of a handoff at its receiving end.

Must not know: how a prefix is cached or read.
"""

from collections.abc import AsyncIterator, Sequence

from opengyre.engines.checksum import digest_of
from opengyre.seams.engine import Chunk, GenerateRequest
from opengyre.seams.kv import KVRef, KVTaken


def refusal_of(ref: KVRef, ids: Sequence[int], *, version: int, model: str) -> str:
    """In words, why `ref` is no prefix of `ids` under this version of this model; "" if it is."""
    if ref.version != version:
        return f"it is of version {ref.version}, here is {version}"
    if ref.model != model:
        return f"it is of another model: {ref.model}, here is {model}"
    if not 0 < ref.num_tokens <= len(ids):
        return f"it has {ref.num_tokens} tokens, the request {len(ids)}"
    if ref.digest != digest_of(ids[: ref.num_tokens]):
        return "it is of other tokens"
    return ""


def import_request(ref: KVRef) -> GenerateRequest:
    """Asks for no token: the prefix is cached, and nothing else."""
    return GenerateRequest(
        request_id=f"import of {ref.ref}",
        execution=ref.execution,
        prompt_ids=ref.ids,
        max_new_tokens=0,
        kv=ref,
    )


async def taken_by(chunks: AsyncIterator[Chunk], ref: KVRef) -> KVTaken:
    """What an import came to."""
    taken: KVTaken | None = None
    last = Chunk()
    async for last in chunks:
        taken = last.taken or taken
    return taken or KVTaken(ref=ref.ref, num_tokens=0, reason=last.reason or str(last.finish))
