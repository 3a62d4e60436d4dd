"""Anthropic's content blocks to neutral messages, and what carries our own words through them.

Must not know: requests, events. Invariants: the same conversation gives equal messages however it
is written (string or one block, moved `cache_control`, key order, null/""/absent); a block that
cannot be shown to the model is refused by its name, or a note if a tool brought it.
"""

import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec

from opengyre.gateway.dialects.fields import UNSEEN_IMAGE, refused
from opengyre.gateway.request import Call, Message, Role

Block = tuple[str, dict[str, Any]]
"""A content block and where it stands, for refusals."""

UNPARSED = "__unparsedToolInput"
_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_UNSEEN = {
    "image": UNSEEN_IMAGE,
    "document": "[a document, which this model cannot see]",
}
_BILLING = "x-anthropic-billing-header:"
_NOTHING: Mapping[str, str] = {}
_MARK = b"gyre1"
_MAX_RATIO = 8
_canonical = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


def read_conversation(system: Any, messages: Any) -> tuple[Message, ...]:
    """Neutral messages. Consecutive ones of one role are one turn, as Anthropic defines it.

    Raises Refusal for malformed and unsupported content and for a prefilled answer.
    """
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "messages must be a non-empty list")
    rules = [block for block in _blocks(system, "system") if not _is_billing(block)]
    found = _said(Role.SYSTEM, _text(rules))
    for role, turn in groupby(enumerate(messages), key=_role):
        blocks = [block for k, message in turn for block in _blocks_of(message, k)]
        match role:
            case Role.ASSISTANT:
                found.append(_assistant(blocks))
            case Role.USER:
                found += _user(blocks)
            case _:
                found += _said(role, _text(blocks))
    if _ROLES[messages[-1]["role"]] is Role.ASSISTANT:
        raise refused(
            "messages",
            "This model does not support assistant message prefill. "
            "The conversation must end with a user message.",
        )
    if not found:
        raise refused("messages", "messages say nothing")
    return tuple(found)


def sign(thinking: str) -> str:
    """The signature of a thinking block: it holds the thinking, for clients that do not show it."""
    data = thinking.encode()
    packed = zlib.compress(data)
    if len(packed) * _MAX_RATIO < len(data):
        packed = zlib.compress(data, 0)
    return binascii.b2a_base64(_MARK + packed, newline=False).decode()


def signed(signature: Any) -> str:
    """The thinking that `sign` put into a signature; "" for one that is not ours."""
    try:
        data = binascii.a2b_base64(signature, strict_mode=True)
        if not data.startswith(_MARK):
            return ""
        packed = data[len(_MARK) :]
        inflate = zlib.decompressobj()
        text = inflate.decompress(packed, _MAX_RATIO * len(packed)).decode()
    except (TypeError, ValueError, binascii.Error, zlib.error):
        return ""
    return text if inflate.eof else ""


def input_json(arguments: str) -> msgspec.Raw:
    """`tool_use.input` of an unstreamed answer: the arguments as sampled if they are an object.

    Others are wrapped as Claude Code wraps what it cannot parse, and come back so.
    """
    text = arguments or "{}"
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return msgspec.Raw(text.encode())
    except (msgspec.MsgspecError, RecursionError):
        pass
    wrapped = {UNPARSED: {"raw": arguments, "len": len(arguments)}}
    return msgspec.Raw(msgspec.json.encode(wrapped))


def _said(role: Role, text: str) -> list[Message]:
    return [Message(role=role, text=text)] if text else []


def _role(item: tuple[int, Any]) -> Role:
    k, message = item
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        where = f"messages[{k}]"
        raise refused(where, f"{where} needs a role: one of {', '.join(_ROLES)}")
    return _ROLES[role]


def _blocks_of(message: dict[str, Any], k: int) -> list[Block]:
    return _blocks(message.get("content"), f"messages[{k}].content")


def _blocks(content: Any, where: str) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise refused(where, f"{where} must be a string or a list of blocks")
    found = []
    for k, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise refused(f"{where}[{k}]", f"{where}[{k}] must be a block with a type")
        found.append((f"{where}[{k}]", block))
    return found


def _is_billing(block: Block) -> bool:
    """A header that Claude Code sends as a block; it changes between calls and instructs nobody."""
    text = block[1].get("text")
    return isinstance(text, str) and text.startswith(_BILLING)


def _assistant(blocks: list[Block]) -> Message:
    text, reasoning, calls = "", "", []
    for where, block in blocks:
        match block["type"]:
            case "text":
                text += _string(block, "text", where)
            case "thinking":
                reasoning += _thinking(block, where)
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                raise _unsupported(block, where)
    return Message(role=Role.ASSISTANT, text=text, reasoning=reasoning or None, calls=tuple(calls))


def _user(blocks: list[Block]) -> list[Message]:
    """Results in the client's order, then what else was said: a tool brought its images."""
    results = [block for block in blocks if block[1]["type"] == "tool_result"]
    found = [_result(block, where) for where, block in results]
    others = (block for block in blocks if block[1]["type"] != "tool_result")
    text = _text(others, unseen=_UNSEEN if results else _NOTHING)
    if text or not found:
        found.append(Message(role=Role.USER, text=text))
    return found


def _result(block: dict[str, Any], where: str) -> Message:
    call_id = _string(block, "tool_use_id", where)
    if not call_id:
        raise refused(where, f"{where} needs a tool_use_id")
    text = _text(_blocks(block.get("content"), f"{where}.content"), unseen=_UNSEEN)
    if not text and block.get("is_error") is True:
        text = "error"
    return Message(role=Role.TOOL, text=text, call_id=call_id)


def _text(blocks: Iterable[Block], *, unseen: Mapping[str, str] = _NOTHING) -> str:
    """Blocks as one text, each on a line of its own. `unseen`: notes that stand for block types."""
    joined = ""
    for where, block in blocks:
        part = unseen.get(block["type"]) or _shown(block, where)
        is_apart = joined.endswith("\n") or part.startswith("\n")
        joined += part if is_apart or not joined or not part else "\n" + part
    return joined


def _shown(block: dict[str, Any], where: str) -> str:
    match block["type"]:
        case "text":
            return _string(block, "text", where)
        case "tool_reference":
            return _string(block, "tool_name", where)
        case _:
            raise _unsupported(block, where)


def _thinking(block: dict[str, Any], where: str) -> str:
    """As sent; from our signature if the client was not shown it."""
    sent = _string(block, "thinking", where)
    return sent if sent.strip() else signed(block.get("signature"))


def _call(block: dict[str, Any], where: str) -> Call:
    call_id, name = _string(block, "id", where), _string(block, "name", where)
    if not call_id or not name:
        raise refused(where, f"{where} needs an id and a name")
    return Call(call_id=call_id, name=name, arguments=_arguments(block.get("input"), where))


def _arguments(value: Any, where: str) -> str:
    """Canonical JSON; the raw text of what a client could not parse."""
    unparsed = value.get(UNPARSED) if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        return str(unparsed["raw"])
    try:
        return _canonical.encode({} if value is None else value)
    except RecursionError as error:
        raise refused(where, f"{where}.input is nested too deeply") from error


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", f"{where}.{name} must be a string")
    return value


def _unsupported(block: dict[str, Any], where: str) -> Exception:
    return refused(where, f"{where}: blocks of type {block['type']!r} are not supported here")
