"""OpenAI chat completions, pure: body to neutral request, neutral pieces to JSON and SSE.

Must not know: HTTP, sessions, tokens. Invariants: a field that would change the meaning and that
we cannot honour is refused, others are tolerated; a stream is role, deltas, one finish_reason,
usage if asked for, `[DONE]`, and its last event is one write.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from opengyre.gateway.request import (
    Answer,
    Call,
    CallPiece,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Refusal,
    Request,
    Role,
    Sampling,
    TextPiece,
    Tool,
    Usage,
)

_json = msgspec.json.Encoder()
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_ONLY = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True),
    "tool_choice": (None, "auto", "none"),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
}
_MAX_STOPS = 16


def parse(body: dict[str, Any]) -> Request:
    """Raises Refusal, naming the field, for what is malformed or cannot be honoured."""
    for name, allowed in _ONLY.items():
        if body.get(name) not in allowed:
            raise _refused(name, f"{name}={body[name]!r} is not supported here")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", "messages must be a non-empty list")
    options = _typed(body, "stream_options", dict, {})
    return Request(
        model=_typed(body, "model", str, ""),
        messages=tuple(_message(one, k) for k, one in enumerate(messages)),
        tools=() if body.get("tool_choice") == "none" else _tools(body),
        sampling=_sampling(body),
        is_stream=_typed(body, "stream", bool, False),
        has_usage_event=options.get("include_usage") is True,
    )


def error_json(refusal: Refusal) -> bytes:
    error = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param or None,
        "code": refusal.code or None,
    }
    return _json.encode({"error": error})


def models_json(model: str, *, created_s: int) -> bytes:
    one = {"id": model, "object": "model", "created": created_s, "owned_by": "opengyre"}
    return _json.encode({"object": "list", "data": [one]})


class ChatAnswer:
    """One answer as its client wants it: `whole`, or the events `opening`, `delta`...,
    `closing` in this order."""

    def __init__(self, request: Request, *, answer_id: str, created_s: int) -> None:
        self._head = {"id": answer_id, "created": created_s, "model": request.model}
        self._chunk_head = {"object": "chat.completion.chunk", **self._head}
        self._has_usage_event = request.has_usage_event

    def whole(self, answer: Answer) -> bytes:
        """The body of an unstreamed answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.text or None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.calls:
            message["tool_calls"] = [_call_json(call) for call in answer.message.calls]
        choice = {"index": 0, "message": message, "finish_reason": answer.ending, "logprobs": None}
        usage = _usage_json(answer.usage)
        body = {"object": "chat.completion", **self._head, "choices": [choice], "usage": usage}
        return _json.encode(body)

    def opening(self) -> bytes:
        return self._choice({"role": "assistant", "content": ""})

    def delta(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def closing(self, ending: Ending, usage: Usage) -> bytes:
        """The terminal event, whole."""
        last = self._choice({}, finish_reason=ending)
        if self._has_usage_event:
            last += self._event({"choices": [], "usage": _usage_json(usage)})
        return last + b"data: [DONE]\n\n"

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case TextPiece(text=text):
                return self._choice({"content": text})
            case ReasoningPiece(text=text):
                return self._choice({"reasoning_content": text})
            case CallPiece(index=index, call=call):
                opened = {"index": index, **_call_json(call)}
                opened["function"] = {"name": call.name, "arguments": ""}
                filled = {"index": index, "function": {"arguments": call.arguments}}
                return self._choice({"tool_calls": [opened]}) + self._choice(
                    {"tool_calls": [filled]}
                )

    def _choice(self, delta: dict[str, Any], *, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return self._event({"choices": [choice]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._has_usage_event else {}
        return b"data: " + _json.encode({**self._chunk_head, **usage, **fields}) + b"\n\n"


def _call_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_reused_tokens},
    }


def _message(value: Any, k: int) -> Message:
    where = f"messages[{k}]"
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise _refused(where, f"{where} needs a role: one of {', '.join(_ROLES)}")
    role = _ROLES[value["role"]]
    if value.get("function_call"):
        raise _refused(where, f"{where}.function_call is not supported; use tool_calls")
    is_assistant = role is Role.ASSISTANT
    reasoning = value.get("reasoning_content") if is_assistant else None
    if reasoning is not None and not isinstance(reasoning, str):
        raise _refused(where, f"{where}.reasoning_content must be a string")
    return Message(
        role=role,
        text=_text(value.get("content"), f"{where}.content"),
        reasoning=reasoning,
        calls=_calls(value, where) if is_assistant else (),
        call_id=str(value.get("tool_call_id") or "") if role is Role.TOOL else "",
    )


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(where, f"{where} must be a string or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise _refused(where, f"{where}: only text parts are supported")
        texts.append(text)
    return "".join(texts)


def _calls(message: dict[str, Any], where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _refused(where, f"{where}.tool_calls must be a list")
    return tuple(_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls))


def _call(value: Any, where: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _refused(where, f"{where} needs function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _json.encode(arguments if arguments is not None else {}).decode()
    return Call(call_id=str(value.get("id") or ""), name=function["name"], arguments=arguments)


def _tools(body: dict[str, Any]) -> tuple[Tool, ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise _refused("tools", "tools must be a list")
    for k, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused(f"tools[{k}]", f"tools[{k}] must be a function with a name")
    return tuple(tools)


def _sampling(body: dict[str, Any]) -> Sampling:
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return Sampling(
        temperature=_number(body, "temperature", low=0.0, high=2.0),
        top_p=_number(body, "top_p", low=0.0, high=1.0),
        top_k=_integer(body, "top_k", low=-1),
        max_new_tokens=_integer(body, name, low=1),
        seed=_integer(body, "seed", low=-(2**63)),
        stop=_stops(body.get("stop")),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    is_fine = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_fine or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused("stop", f"stop must be at most {_MAX_STOPS} non-empty strings")
    return tuple(stops)


def _number(body: dict[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refused(name, f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def _integer(body: dict[str, Any], name: str, *, low: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise _refused(name, f"{name} must be an integer of at least {low}")
    return value


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _refused(name, f"{name} must be of type {kind.__name__}")
    return value


def _refused(param: str, message: str) -> Refusal:
    return Refusal(message, param=param)
