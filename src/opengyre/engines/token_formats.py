"""What the scripted token server says and understands: vLLM's two token wires, SGLang's, and chat.

Owns: request and event shapes, seen from the server. Must not know: HTTP, which engine answers.
Only what clients of token servers read is written; unknown request fields are ignored.
"""

import itertools
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from opengyre.seams.engine import Chunk, Finish, GenerateRequest

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_FINISHES = {Finish.STOP: "stop", Finish.LENGTH: "length"}
_numbers = itertools.count(1)


class Answering(Protocol):
    """One request in one format. `event` gives the server-sent event of a chunk."""

    request: GenerateRequest
    is_stream: bool

    def event(self, chunk: Chunk) -> bytes: ...

    def whole(self, chunk: Chunk) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class GenerateAnswering:
    """vLLM's `/inference/v1/generate`."""

    def __init__(self, body: dict[str, Any]) -> None:
        sampling = body.get("sampling_params", {})
        self.request = _request(body["token_ids"], sampling, str(body.get("request_id", "")))
        self.is_stream = bool(body.get("stream"))

    def event(self, chunk: Chunk) -> bytes:
        return _event({"request_id": self.request.request_id, "choices": [self._choice(chunk)]})

    def whole(self, chunk: Chunk) -> bytes:
        choices = [self._choice(chunk)]
        return _encode({"request_id": self.request.request_id, "choices": choices})

    def _choice(self, chunk: Chunk) -> dict[str, Any]:
        rows = zip(chunk.ids, chunk.logprobs, strict=True)
        content = [{"token_id": token, "logprob": logprob} for token, logprob in rows]
        return {
            "index": 0,
            "token_ids": chunk.ids,
            "logprobs": {"content": content},
            "finish_reason": _finish_reason(chunk),
        }


class CompletionAnswering:
    """vLLM's `/v1/completions` with token ids in and, if asked for, out."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.request = _request(body["prompt"], body, str(body.get("request_id", "")))
        self.is_stream = bool(body.get("stream"))
        self._has_ids = bool(body.get("return_token_ids"))

    def event(self, chunk: Chunk) -> bytes:
        return _event(self._answer(chunk))

    def whole(self, chunk: Chunk) -> bytes:
        return _encode(self._answer(chunk))

    def _answer(self, chunk: Chunk) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "",
            "token_ids": chunk.ids if self._has_ids else None,
            "logprobs": {"token_logprobs": chunk.logprobs},
            "finish_reason": _finish_reason(chunk),
        }
        return {"object": "text_completion", "choices": [choice]}


class SglangAnswering:
    """SGLang's `/generate`; everything so far in each event unless `is_incremental`."""

    def __init__(self, body: dict[str, Any], *, is_incremental: bool) -> None:
        sampling = body.get("sampling_params", {})
        renamed = {
            **sampling,
            "max_tokens": sampling.get("max_new_tokens", 128),
            "seed": sampling.get("sampling_seed", 0),
        }
        self.request = _request(body["input_ids"], renamed, str(body.get("rid", "")))
        self.is_stream = bool(body.get("stream"))
        self._is_incremental = is_incremental
        self._ids: list[int] = []
        self._rows: list[tuple[float, int, None]] = []
        self._num = 0

    def event(self, chunk: Chunk) -> bytes:
        return _event(self._answer(chunk))

    def whole(self, chunk: Chunk) -> bytes:
        return _encode(self._answer(chunk))

    def _answer(self, chunk: Chunk) -> dict[str, Any]:
        if self._is_incremental:
            self._ids, self._rows = [], []
        self._num += len(chunk.ids)
        self._ids += chunk.ids
        rows = zip(chunk.ids, chunk.logprobs, strict=True)
        self._rows += [(logprob, token, None) for token, logprob in rows]
        reason = _finish_reason(chunk)
        meta = {
            "id": self.request.request_id,
            "completion_tokens": self._num,
            "finish_reason": {"type": reason} if reason else None,
            "output_token_logprobs": self._rows,
        }
        return {"text": "", "output_ids": self._ids, "meta_info": meta}


class ChatAnswering:
    """`/v1/chat/completions` in plain text: ChatML in, decoded text out; no tools."""

    def __init__(self, body: dict[str, Any], tokenizer: Tokenizer) -> None:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"]]
        prompt = "".join(turns) + "<|im_start|>assistant\n"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        self.request = _request(ids, {**body, "max_tokens": limit or 2**31}, "")
        self.is_stream = bool(body.get("stream"))
        self._model = body.get("model", "")
        self._has_ids = bool(body.get("return_token_ids"))
        self._has_logprobs = bool(body.get("logprobs"))
        self._has_told_prompt = False
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)

    def event(self, chunk: Chunk) -> bytes:
        choice = {"index": 0, "delta": {"content": self._text(chunk.ids)}, **self._rest(chunk)}
        return _event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def whole(self, chunk: Chunk) -> bytes:
        message = {"role": "assistant", "content": self._text(chunk.ids)}
        choice = {"index": 0, "message": message, **self._rest(chunk)}
        num_prompt, num = len(self.request.prompt_ids), len(chunk.ids)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num,
            "total_tokens": num_prompt + num,
        }
        return _encode({**self._head("chat.completion"), "choices": [choice], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {
            "id": f"chatcmpl-{self.request.request_id}",
            "object": kind,
            "created": 0,
            "model": self._model,
        }
        if self._has_ids and not self._has_told_prompt:
            head["prompt_token_ids"] = self.request.prompt_ids
            self._has_told_prompt = True
        return head

    def _rest(self, chunk: Chunk) -> dict[str, Any]:
        rest: dict[str, Any] = {"finish_reason": _finish_reason(chunk)}
        if self._has_ids:
            rest["token_ids"] = chunk.ids
        if self._has_logprobs:
            rest["logprobs"] = {"content": [{"logprob": one} for one in chunk.logprobs]}
        return rest

    def _text(self, ids: list[int]) -> str:
        return "".join(self._decoder.step(self._tokenizer, token) or "" for token in ids)


def _request(ids: Any, sampling: dict[str, Any], request_id: str) -> GenerateRequest:
    """Raises msgspec.ValidationError for numbers of another kind."""
    number = next(_numbers)
    return msgspec.convert(
        {
            "request_id": f"{request_id or 'r'}#{number}",
            "execution": "",
            "prompt_ids": ids,
            "max_new_tokens": sampling.get("max_tokens", 16),
            "temperature": sampling.get("temperature", 1.0),
            "top_p": sampling.get("top_p", 1.0),
            "min_p": sampling.get("min_p", 0.0),
            "seed": sampling.get("seed") or 0,
            "stop_ids": sampling.get("stop_token_ids") or [],
        },
        GenerateRequest,
    )


def _finish_reason(chunk: Chunk) -> str | None:
    return None if chunk.finish is None else _FINISHES.get(chunk.finish, str(chunk.finish))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
