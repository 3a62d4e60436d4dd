"""Input items of the Responses protocol as messages.

Owns: which items are one assistant message. Must not know: HTTP, sessions, tokens. Invariants: the
items of an answer of ours come back as exactly its message, also with results between its calls;
an item that cannot be read and whose loss would change the meaning is refused.
"""

import base64
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from opengyre.gateway.dialects.fields import UNSEEN_IMAGE, refused
from opengyre.gateway.dialects.responses_tools import ToolTable, custom_call
from opengyre.gateway.request import Call, Message, Role

RAW_CUSTOM_CALL = "ctr"
"""Begins the id of a custom call whose input are the arguments as they were sampled."""
_SEALED = "gyre1."
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_WITHOUT_MEANING = ("mcp_list_tools", "web_search_call", "ghost_snapshot")
_UNSEEN = {"input_image": UNSEEN_IMAGE}
_OWN_ID = re.compile(r"(?:rs|msg|fc|ctc|ctr|call)_(.+_t\d+_a\d+)(?:_\d+)?")


def seal(reasoning: str) -> str:
    """`encrypted_content`: says what it is, and carries the reasoning itself."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: Any) -> str | None:
    """The reasoning in it; None if it is not ours."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
    except ValueError:
        return None


def stem_of(name: str) -> str:
    """An attempt's name as ids hold it: `e000123.t7.a0` is `e000123_t7_a0`."""
    return "_".join(name.rsplit(".", 2))


def name_of(stem: str) -> str:
    return ".".join(stem.rsplit("_", 2))


class _Kind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class _Turn:
    """An assistant message while its items come. `owner`: the stem of the answer of ours that its
    ids name; `is_reference`: it stands for all of that one."""

    owner: str
    last: _Kind
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    is_reference: bool = False

    def message(self) -> Message:
        if self.is_reference:
            return Message(role=Role.ASSISTANT, reference=name_of(self.owner))
        return Message(
            role=Role.ASSISTANT,
            text="".join(self.texts),
            reasoning="".join(self.reasonings) or None,
            calls=tuple(self.calls),
        )


class ItemReader:
    """`read` items in order, then `messages()`."""

    def __init__(self, table: ToolTable) -> None:
        self._table = table
        self._done: list[Message | _Turn] = []
        self._open: _Turn | None = None

    def messages(self) -> tuple[Message, ...]:
        return tuple(one.message() if isinstance(one, _Turn) else one for one in self._done)

    def read(self, item: Any, where: str) -> None:
        """Raises Refusal."""
        if not isinstance(item, dict):
            raise refused(where, f"{where} must be an object")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        match kind:
            case "message":
                self._read_message(item, where)
            case "reasoning":
                if text := _reasoning(item, where):
                    self._turn(item, _Kind.REASONING).reasonings.append(text)
            case "function_call" | "custom_tool_call":
                self._turn(item, _Kind.CALL).calls.append(self._call(item, where))
            case "function_call_output" | "custom_tool_call_output":
                text = _text(item.get("output"), f"{where}.output", unseen=_UNSEEN)
                call_id = str(item.get("call_id") or "")
                self._done.append(Message(role=Role.TOOL, text=text, call_id=call_id))
            case "item_reference":
                self._refer(item, where)
            case _ if kind not in _WITHOUT_MEANING:
                raise refused(where, f"{where}: items of type {kind!r} are not supported here")

    def _read_message(self, item: dict[str, Any], where: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise refused(where, f"{where} needs a role: one of {', '.join(_ROLES)}")
        text = _text(item.get("content"), f"{where}.content")
        if role is Role.ASSISTANT:
            self._turn(item, _Kind.TEXT).texts.append(text)
        else:
            self._open = None
            self._done.append(Message(role=role, text=text))

    def _refer(self, item: dict[str, Any], where: str) -> None:
        """Reasoning may be missing; anything else gives back the answer that it is of."""
        if str(item.get("id")).startswith("rs_"):
            return
        if not _owner(item):
            raise refused(where, f"{where}: no item {item.get('id')!r} of an answer from here")
        self._turn(item, _Kind.CALL).is_reference = True

    def _call(self, item: dict[str, Any], where: str) -> Call:
        if not isinstance(item.get("name"), str):
            raise refused(where, f"{where} needs a name")
        shown = self._table.shown(str(item.get("namespace") or ""), item["name"])
        call_id = str(item.get("call_id") or item.get("id") or "")
        is_custom = item["type"] == "custom_tool_call"
        text = item.get("input" if is_custom else "arguments")
        if not isinstance(text, str):
            raise refused(where, f"{where}: what it was called with must be a string")
        if not is_custom:
            return Call(call_id=call_id, name=shown, arguments=text)
        is_raw = str(item.get("id")).startswith(RAW_CUSTOM_CALL)
        return custom_call(call_id, shown, text, is_raw=is_raw)

    def _turn(self, item: dict[str, Any], kind: _Kind) -> _Turn:
        """The assistant message that the item belongs to; only results may be behind it."""
        owner = _owner(item)
        turn = self._open
        if turn is None or not self._is_of(turn, owner, kind):
            turn = self._open = _Turn(owner=owner, last=kind)
            self._done.append(turn)
        turn.owner = turn.owner or owner
        turn.last = kind
        return turn

    def _is_of(self, turn: _Turn, owner: str, kind: _Kind) -> bool:
        """By ids where there are some, else by place: reasoning begins an answer, and a text
        beside a text is another one's."""
        if owner and turn.owner:
            return owner == turn.owner
        if self._done[-1] is not turn:
            return False
        is_next = kind is _Kind.CALL or turn.last is _Kind.REASONING
        return is_next or (kind is _Kind.TEXT and turn.last is _Kind.CALL)


def _owner(item: dict[str, Any]) -> str:
    for key in ("id", "call_id"):
        match = _OWN_ID.fullmatch(str(item.get(key)))
        if match is not None:
            return match.group(1)
    return ""


def _reasoning(item: dict[str, Any], where: str) -> str:
    """What was sealed, else what was shown; of others' sealed reasoning there is nothing."""
    sealed = unseal(item.get("encrypted_content"))
    if sealed is not None:
        return sealed
    for key in ("content", "summary"):
        if item.get(key):
            return _text(item[key], f"{where}.{key}")
    return ""


def _text(content: Any, where: str, *, unseen: dict[str, str] | None = None) -> str:
    """The text of a string or of parts; `unseen` stands for parts of a type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, f"{where} must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        text = text if kind in (*_TEXT_PARTS, "refusal") else (unseen or {}).get(str(kind))
        if not isinstance(text, str):
            raise refused(where, f"{where}: only text parts are supported, not {kind!r}")
        texts.append(text)
    return "".join(texts)
