"""Neutral messages as the chat dictionaries that chat templates are written for.

Owns: what a renderer is told of a message. Must not know: renderers, tokens. Invariants: a tool's
result carries its tool's name when the call is among the messages; arguments stay the string
they came as, unless a template cannot hold it.
"""

import json
from collections.abc import Sequence
from typing import Any

from opengyre.gateway.request import Call, Message, Role


def chat_messages(
    messages: Sequence[Message], *, native_ids: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """`native_ids`: what the model calls the calls, in their order, where its format says."""
    names: dict[str, str] = {}
    natives: dict[str, str] = {}
    left = list(reversed(native_ids))
    chat = []
    for message in messages:
        for call in message.calls:
            names[call.call_id] = call.name
            natives[call.call_id] = left.pop() if left else call.call_id
        chat.append(_chat_message(message, names, natives))
    return chat


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """For templates with one system message, at the beginning: those that stand there are joined,
    later ones are a user's."""
    num = next((k for k, m in enumerate(messages) if m.role is not Role.SYSTEM), len(messages))
    text = "\n\n".join(message.text for message in messages[:num])
    first = [Message(role=Role.SYSTEM, text=text)] if num else []
    return first + without_system(messages[num:])


def without_system(messages: Sequence[Message]) -> list[Message]:
    return [
        Message(role=Role.USER, text=message.text) if message.role is Role.SYSTEM else message
        for message in messages
    ]


def with_object_arguments(messages: Sequence[Message]) -> list[Message]:
    """For templates that write nothing else: arguments that are no JSON object become one that
    holds their text."""
    return [
        Message(
            role=message.role,
            text=message.text,
            reasoning=message.reasoning,
            calls=tuple(_with_object(call) for call in message.calls),
        )
        if message.calls
        else message
        for message in messages
    ]


def _with_object(call: Call) -> Call:
    try:
        is_object = isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    text = call.arguments if is_object else json.dumps({"arguments": call.arguments})
    return Call(call_id=call.call_id, name=call.name, arguments=text)


def _chat_message(
    message: Message, names: dict[str, str], natives: dict[str, str]
) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.role is Role.TOOL:
        chat["tool_call_id"] = natives.get(message.call_id, message.call_id)
        if message.call_id in names:
            chat["name"] = names[message.call_id]
    if message.reasoning is not None:
        chat["reasoning_content"] = message.reasoning
    if message.calls:
        chat["tool_calls"] = [
            {
                "id": natives[call.call_id],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return chat
