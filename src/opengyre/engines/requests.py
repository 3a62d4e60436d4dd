"""Requests that no engine of a size can take, however often they come.

Must not know: engines, queues.
"""

from opengyre.seams.engine import GenerateRequest


def misfit(request: GenerateRequest, *, context_tokens: int, num_ids: int | None = None) -> str:
    """In words, what is wrong with a prompt; "" if nothing is. `num_ids`: those of the vocabulary,
    None where an engine cannot say."""
    ids = request.prompt_ids
    if not ids:
        return "the prompt is empty"
    if len(ids) > context_tokens:
        return f"a prompt of {len(ids)} tokens exceeds the context of {context_tokens}"
    if num_ids is not None and not 0 <= min(ids) <= max(ids) < num_ids:
        outside = next(one for one in ids if not 0 <= one < num_ids)
        return f"token id {outside} of the prompt is not in a vocabulary of {num_ids}"
    return ""
