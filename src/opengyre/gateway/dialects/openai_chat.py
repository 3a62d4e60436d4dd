"""OpenAI chat completions, pure: body to neutral request, neutral pieces to JSON and SSE.

Must not know: HTTP, sessions, tokens. Invariants: a field that would change the meaning and that
we cannot honour is refused, others are tolerated; a stream is role, deltas, one finish_reason,
usage if asked for, `[DONE]`, and its last event is one write.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from opengyre.gateway.dialects.fields import (
    UNSEEN_IMAGE,
    check_only,
    integer,
    number,
    openai_error_json,
    refused,
    stops,
    typed,
)
from opengyre.gateway.request import (
    Answer,
    Call,
    CallEnd,
    CallPiece,
    CallStart,
    ChoiceMode,
    Ending,
    Message,
    Piece,
    ReasoningPiece,
    Refusal,
    Request,
    Role,
    Sampling,
    TextPiece,
    TokenLogprob,
    Tool,
    ToolChoice,
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
    "logit_bias": (None, {}),
    "logprobs": (None, False, True),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
}
_FINISH = {
    Ending.STOP: "stop",
    Ending.STOP_STRING: "stop",
    Ending.LENGTH: "length",
    Ending.CALLS: "tool_calls",
}


class OpenAIChat:
    """The Dialect of `/v1/chat/completions`."""

    name = "openai-chat"

    def parse(self, body: dict[str, Any]) -> Request:
        """Raises Refusal, naming the field, for what is malformed or cannot be honoured."""
        check_only(body, _ONLY)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refused("messages", "messages must be a non-empty list")
        options = typed(body, "stream_options", dict, {})
        tools = _tools(body)
        return Request(
            model=typed(body, "model", str, ""),
            messages=tuple(_message(one, k) for k, one in enumerate(messages)),
            tools=tools,
            sampling=_sampling(body),
            choice=_choice(body.get("tool_choice"), tools),
            is_parallel=typed(body, "parallel_tool_calls", bool, True),
            has_logprobs=body.get("logprobs") is True,
            is_stream=typed(body, "stream", bool, False),
            has_usage_event=options.get("include_usage") is True,
        )

    def form(
        self, body: dict[str, Any], request: Request, *, name: str, created_s: int
    ) -> "ChatAnswer":
        return ChatAnswer(request, answer_id=f"chatcmpl-{name}", created_s=created_s)

    def error_json(self, refusal: Refusal) -> bytes:
        return openai_error_json(refusal)


def models_json(model: str, *, created_s: int) -> bytes:
    return _json.encode({"object": "list", "data": [_model(model, created_s)]})


def model_json(model: str, *, created_s: int) -> bytes:
    return _json.encode(_model(model, created_s))


def _model(model: str, created_s: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created_s, "owned_by": "opengyre"}


class ChatAnswer:
    """The AnswerForm of a chat completion."""

    def __init__(self, request: Request, *, answer_id: str, created_s: int) -> None:
        self._head = {"id": answer_id, "created": created_s, "model": request.model}
        self._chunk_head = {"object": "chat.completion.chunk", **self._head}
        self._has_usage_event = request.has_usage_event
        self._has_logprobs = request.has_logprobs

    def whole(self, answer: Answer) -> bytes:
        """The body of an unstreamed answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.text or None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.calls:
            message["tool_calls"] = [_call_json(call) for call in answer.message.calls]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _FINISH[answer.ending],
            "logprobs": self._logprobs_json(answer.logprobs),
        }
        usage = _usage_json(answer.usage)
        body = {"object": "chat.completion", **self._head, "choices": [choice], "usage": usage}
        return _json.encode(body)

    def opening(self, num_prompt_tokens: int) -> bytes:
        return self._choice({"role": "assistant", "content": ""})

    def delta(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Log probabilities go with the first of the events."""
        told = self._logprobs_json(logprobs) if logprobs else None
        events = []
        for piece in pieces:
            delta = _delta_json(piece)
            if delta is not None:
                events.append(self._choice(delta, logprobs=told))
                told = None
        if told is not None:
            events.append(self._choice({}, logprobs=told))
        return b"".join(events)

    def closing(self, answer: Answer) -> bytes:
        """The terminal event, whole."""
        last = self._choice({}, finish_reason=_FINISH[answer.ending])
        if self._has_usage_event:
            last += self._event({"choices": [], "usage": _usage_json(answer.usage)})
        return last + b"data: [DONE]\n\n"

    def _logprobs_json(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {"content": [_logprob_json(one) for one in logprobs], "refusal": None}

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._event({"choices": [choice]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._has_usage_event else {}
        return b"data: " + _json.encode({**self._chunk_head, **usage, **fields}) + b"\n\n"


def _delta_json(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case TextPiece(text=text):
            return {"content": text}
        case ReasoningPiece(text=text):
            return {"reasoning_content": text}
        case CallStart(index=index, call_id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            begun = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [begun]}
        case CallPiece(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def _logprob_json(one: TokenLogprob) -> dict[str, Any]:
    data = list(one.data)
    return {"token": one.text, "logprob": one.logprob, "bytes": data, "top_logprobs": []}


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
    told = value.get("role") if isinstance(value, dict) else None
    role = _ROLES.get(told) if isinstance(told, str) else None
    if role is None:
        raise refused(where, f"{where} needs a role: one of {', '.join(_ROLES)}")
    if value.get("function_call"):
        raise refused(where, f"{where}.function_call is not supported; use tool_calls")
    is_assistant = role is Role.ASSISTANT
    reasoning = value.get("reasoning_content") if is_assistant else None
    if reasoning is not None and not isinstance(reasoning, str):
        raise refused(where, f"{where}.reasoning_content must be a string")
    return Message(
        role=role,
        text=_text(value.get("content"), f"{where}.content", is_result=role is Role.TOOL),
        reasoning=reasoning,
        calls=_calls(value, where) if is_assistant else (),
        call_id=str(value.get("tool_call_id") or "") if role is Role.TOOL else "",
    )


def _text(content: Any, where: str, *, is_result: bool) -> str:
    """A picture among the results of tools is told in words: a refusal would end the agent."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, f"{where} must be a string or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if is_result and isinstance(part, dict) and part.get("type") == "image_url":
            text = UNSEEN_IMAGE
        if not isinstance(text, str):
            raise refused(where, f"{where}: only text parts are supported")
        texts.append(text)
    return "".join(texts)


def _calls(message: dict[str, Any], where: str) -> tuple[Call, ...]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise refused(where, f"{where}.tool_calls must be a list")
    return tuple(_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls))


def _call(value: Any, where: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(where, f"{where} needs function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _json.encode(arguments if arguments is not None else {}).decode()
    return Call(call_id=str(value.get("id") or ""), name=function["name"], arguments=arguments)


def _tools(body: dict[str, Any]) -> tuple[Tool, ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise refused("tools", "tools must be a list")
    for k, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"tools[{k}]", f"tools[{k}] must be a function with a name")
    return tuple(tools)


def _choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    match value:
        case None | "auto" | "none" | "required":
            mode = ChoiceMode(value or "auto")
            if mode is ChoiceMode.REQUIRED and not tools:
                raise refused("tool_choice", "tool_choice=required needs tools")
            return ToolChoice(mode=mode)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in [tool["function"]["name"] for tool in tools]:
                raise refused("tool_choice", f"tool_choice names {name!r}, which is no tool")
            return ToolChoice(mode=ChoiceMode.NAMED, name=name)
        case _:
            raise refused("tool_choice", f"tool_choice={value!r} is not supported here")


def _sampling(body: dict[str, Any]) -> Sampling:
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return Sampling(
        temperature=number(body, "temperature", low=0.0, high=2.0),
        top_p=number(body, "top_p", low=0.0, high=1.0),
        top_k=integer(body, "top_k", low=-1),
        min_p=number(body, "min_p", low=0.0, high=1.0),
        max_new_tokens=integer(body, name, low=1),
        seed=integer(body, "seed", low=-(2**63)),
        stop=stops(body, "stop"),
    )
