"""vLLM's two ways of taking token ids and giving them back.

Owns: the shapes of `/inference/v1/generate` (there with `--enable-scale-out`) and of
`/v1/completions` with `return_token_ids`. Must not know: HTTP, who asks. vLLM stops a request when
its connection is closed. Its seeded sampling is not keyed by position, so a resumed request goes
on otherwise than an unbroken one (greedy ones are the same). Logprobs are those at temperature 1
unless the server runs with another `--logprobs-mode`.
"""

from typing import TypeVar

import msgspec

from opengyre.engines.http_engine import ReadEvent, sampling_numbers
from opengyre.seams.engine import Chunk, Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError

LOGPROB_MODE = "raw"
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_encoder = msgspec.json.Encoder()
Event = TypeVar("Event")


class _Logprob(msgspec.Struct):
    logprob: float


class _Content(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Columns(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Error(msgspec.Struct):
    message: str = ""


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Content | None = None
    finish_reason: str | None = None


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Columns | None = None
    finish_reason: str | None = None


class _GenerateEvent(msgspec.Struct):
    choices: list[_GenerateChoice] = []
    error: _Error | None = None


class _CompletionEvent(msgspec.Struct):
    choices: list[_CompletionChoice] = []
    error: _Error | None = None


class VllmGenerate:
    """`/inference/v1/generate`: no text anywhere, the server does not detokenize."""

    kind = "vllm"
    path = "/inference/v1/generate"

    def __init__(self, model: str) -> None:
        self._model = model
        self._decoder = msgspec.json.Decoder(_GenerateEvent)

    def body(self, request: GenerateRequest) -> bytes:
        sampling = {**_sampling(request), "logprobs": 0, "detokenize": False}
        return _encoder.encode(
            {
                "model": self._model,
                "request_id": request.request_id,
                "token_ids": request.prompt_ids,
                "sampling_params": sampling,
                "stream": True,
            }
        )

    def reader(self) -> ReadEvent:
        return self._read

    def abort(self, request_id: str) -> None:
        return None

    def _read(self, data: bytes) -> Chunk:
        event = _decoded(self._decoder, data)
        if not event.choices:
            return _failed(event.error)
        choice = event.choices[0]
        logprobs = choice.logprobs.content or [] if choice.logprobs else []
        return _chunk(choice.token_ids, [one.logprob for one in logprobs], choice.finish_reason)


class VllmCompletions:
    """`/v1/completions`: every server has it; its text is not read."""

    kind = "vllm"
    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model
        self._decoder = msgspec.json.Decoder(_CompletionEvent)

    def body(self, request: GenerateRequest) -> bytes:
        return _encoder.encode(
            {
                "model": self._model,
                "request_id": request.request_id,
                "prompt": request.prompt_ids,
                "return_token_ids": True,
                "logprobs": 0,
                "stream": True,
                **_sampling(request),
            }
        )

    def reader(self) -> ReadEvent:
        return self._read

    def abort(self, request_id: str) -> None:
        return None

    def _read(self, data: bytes) -> Chunk:
        event = _decoded(self._decoder, data)
        if not event.choices:
            return _failed(event.error)
        choice = event.choices[0]
        columns = choice.logprobs.token_logprobs if choice.logprobs else []
        logprobs = [one for one in columns if one is not None]
        return _chunk(choice.token_ids, logprobs, choice.finish_reason)


def _sampling(request: GenerateRequest) -> dict[str, object]:
    """The model's own end token counts only if the request names it."""
    return {
        "max_tokens": request.max_new_tokens,
        **sampling_numbers(request),
        "seed": request.seed,
        "stop_token_ids": request.stop_ids,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


def _decoded(decoder: "msgspec.json.Decoder[Event]", data: bytes) -> Event:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BoundaryError("engine", f"an event cannot be read: {error}", retryable=True) from None


def _failed(error: _Error | None) -> Chunk:
    """An event without choices: usage, or an error in mid-stream."""
    if error is None:
        return Chunk()
    return Chunk(finish=Finish.ERROR, reason=f"the server failed: {error.message}")


def _chunk(ids: list[int] | None, logprobs: list[float], finish_reason: str | None) -> Chunk:
    if ids is None:
        raise BoundaryError("engine", "it gives only text, no token ids", retryable=False)
    if finish_reason is None:
        return Chunk(ids=ids, logprobs=logprobs)
    finish = _FINISHES.get(finish_reason, Finish.ERROR)
    reason = f"the server ended it: {finish_reason}" if finish is Finish.ERROR else ""
    return Chunk(ids=ids, logprobs=logprobs, finish=finish, reason=reason)
