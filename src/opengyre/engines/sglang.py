"""SGLang's `/generate`: input ids in, output ids and their logprobs out.

Owns: its shapes. Must not know: HTTP, who asks. Events carry either what is new or everything so
far (`--incremental-streaming-output` makes it the former, which is cheaper); both are read by the
count of completion tokens they tell. A request stops by `/abort_request`. Its `ignore_eos` would
switch stop ids off too, so the model's own end token ends a request as well. The seed, of which it
takes 31 bits, counts only in `--enable-deterministic-inference`; without it a resumed request goes
on otherwise than an unbroken one. Logprobs are those at the request's temperature, before top-p
and top-k.
"""

import msgspec

from opengyre.engines.http_engine import ReadEvent, sampling_numbers
from opengyre.seams.engine import Chunk, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError

LOGPROB_MODE = "processed"
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_SEED_MASK = 2**31 - 1
_encoder = msgspec.json.Encoder()


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class SglangGenerate:
    kind = "sglang"
    path = "/generate"

    def body(self, request: GenerateRequest) -> bytes:
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            **sampling_numbers(request),
            "stop_token_ids": request.stop_ids,
            "skip_special_tokens": False,
            "sampling_seed": request.seed & _SEED_MASK,
        }
        return _encoder.encode(
            {
                "rid": request.request_id,
                "input_ids": request.prompt_ids,
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": -1,
                "stream": True,
            }
        )

    def reader(self) -> ReadEvent:
        return _Reader().read

    def abort(self, request_id: str) -> tuple[str, bytes]:
        return "/abort_request", _encoder.encode({"rid": request_id})


class _Reader:
    """Knows how many tokens were read, so that it takes the new ones of either kind of event."""

    __slots__ = ("_num_read",)

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, data: bytes) -> Chunk:
        try:
            event = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            reason = f"an event cannot be read: {error}"
            raise BoundaryError("engine", reason, retryable=True) from None
        if event.error is not None:
            return Chunk(finish=Finish.ERROR, reason=f"the server failed: {event.error.message}")
        if event.meta_info is None or event.output_ids is None:
            raise BoundaryError("engine", "it gives only text, no token ids", retryable=False)
        return self._new_part(event.output_ids, event.meta_info)

    def _new_part(self, output_ids: list[int], meta: _Meta) -> Chunk:
        num_new = meta.completion_tokens - self._num_read
        if not 0 <= num_new <= len(output_ids):
            what = f"{len(output_ids)} ids came where {num_new} are new"
            raise BoundaryError("engine", what, retryable=True)
        self._num_read = meta.completion_tokens
        ids = output_ids[len(output_ids) - num_new :]
        rows = meta.output_token_logprobs[-num_new:] if num_new else []
        if [token for _, token, _ in rows] != ids:
            raise BoundaryError("engine", "its logprobs are of other tokens", retryable=True)
        logprobs = [logprob for logprob, _, _ in rows if logprob is not None]
        if meta.finish_reason is None:
            return Chunk(ids=ids, logprobs=logprobs)
        finish = _FINISHES.get(meta.finish_reason.type, Finish.ERROR)
        reason = ""
        if finish is Finish.ERROR:
            words = meta.finish_reason.message or meta.finish_reason.type
            reason = f"the server ended it: {words}"
        return Chunk(ids=ids, logprobs=logprobs, finish=finish, reason=reason)
