"""Tools of the Responses protocol as plain functions with unique names, and back.

Owns: flattening of namespaces, custom tools as functions of one string. Must not know: HTTP,
sessions, tokens. Invariants: a name the model is shown belongs to one tool; a custom call comes
back with the arguments it was made of. Tools that a vendor would run are left out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from opengyre.gateway.dialects.fields import refused
from opengyre.gateway.request import Call, ChoiceMode, Tool, ToolChoice

_INPUT = "input"
_CALLABLE = ("function", "custom")
_MAX_TOOLS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """A tool as its client names it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(slots=True, kw_only=True)
class ToolTable:
    """The tools of one request. Keys of `_clients` are the names that the model is shown."""

    tools: tuple[Tool, ...] = ()
    _clients: dict[str, ToolName] = field(default_factory=dict)
    _shown: dict[tuple[str, str], str] = field(default_factory=dict)

    def client(self, shown: str) -> ToolName:
        """What a called name means; one that was never offered goes to the client as it is."""
        return self._clients.get(shown) or ToolName(name=shown)

    def shown(self, namespace: str, name: str) -> str:
        """The model's name of a tool, also of one that is not offered any more."""
        return self._shown.get((namespace, name)) or _joined(namespace, name)

    def offer(self, value: dict[str, Any], namespace: str) -> None:
        """Add a function or custom tool."""
        name = value["name"]
        shown = _joined(namespace, name)
        while shown in self._clients:
            shown += "_"
        is_custom = value["type"] == "custom"
        self._clients[shown] = ToolName(name=name, namespace=namespace, is_custom=is_custom)
        self._shown.setdefault((namespace, name), shown)
        self.tools += (_custom(value, shown) if is_custom else _function(value, shown),)

    def only(self, allowed: Sequence[str]) -> None:
        """Offer these alone."""
        self.tools = tuple(tool for tool in self.tools if tool["function"]["name"] in allowed)


def read_tools(value: Any) -> ToolTable:
    """Raises Refusal for what is no list of tools."""
    table = ToolTable()
    for k, tool in enumerate(_list(value, "tools")):
        for one, namespace in _flat(tool, f"tools[{k}]"):
            table.offer(one, namespace)
    return table


def read_choice(value: Any, table: ToolTable) -> ToolChoice:
    """May narrow `table`. Raises Refusal for a choice of what is not offered."""
    match value:
        case None | "auto" | "none":
            return ToolChoice(mode=ChoiceMode(value or "auto"))
        case "required":
            choice = ToolChoice(mode=ChoiceMode.REQUIRED)
        case {"type": "function" | "custom"}:
            return ToolChoice(mode=ChoiceMode.NAMED, name=_offered(value, table))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            table.only([_offered(tool, table) for tool in tools])
            choice = ToolChoice(mode=ChoiceMode(mode))
        case _:
            raise refused("tool_choice", f"tool_choice={value!r} is not supported here")
    if choice.mode is ChoiceMode.REQUIRED and not table.tools:
        raise refused("tool_choice", "tool_choice requires a call, but no function is offered")
    return choice


def custom_input(arguments: str) -> str | None:
    """The one string in a custom call's arguments; None if they are anything else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    is_plain = isinstance(value, dict) and list(value) == [_INPUT]
    return value[_INPUT] if is_plain and isinstance(value[_INPUT], str) else None


def custom_call(call_id: str, shown: str, text: str, *, is_raw: bool) -> Call:
    """The call behind a custom one; `is_raw` if its input is the arguments themselves."""
    arguments = text if is_raw else json.dumps({_INPUT: text}, ensure_ascii=False)
    return Call(call_id=call_id, name=shown, arguments=arguments)


def _flat(tool: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(tool, namespace) of what the client itself runs."""
    if _is_callable(tool, where):
        yield tool, ""
    elif tool["type"] == "namespace":
        name = _named(tool, where)["name"]
        for k, inner in enumerate(_list(tool.get("tools"), f"{where}.tools")):
            if _is_callable(inner, f"{where}.tools[{k}]"):
                yield inner, name


def _is_callable(tool: Any, where: str) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise refused(where, f"{where} needs a type")
    return tool["type"] in _CALLABLE and bool(_named(tool, where))


def _named(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise refused(where, f"{where} needs a name")
    return tool


def _list(value: Any, where: str) -> list[Any]:
    value = [] if value is None else value
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise refused(where, f"{where} must be a list of at most {_MAX_TOOLS} tools")
    return value


def _offered(value: Any, table: ToolTable) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    namespace = value.get("namespace") or "" if isinstance(value, dict) else ""
    shown = table.shown(str(namespace), str(name))
    if shown not in [tool["function"]["name"] for tool in table.tools]:
        raise refused("tool_choice", f"tool_choice names {name!r}, which is no function offered")
    return shown


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _function(value: dict[str, Any], shown: str) -> Tool:
    function: dict[str, Any] = {"name": shown}
    for key, kind in (("description", str), ("parameters", dict)):
        if isinstance(value.get(key), kind):
            function[key] = value[key]
    return {"type": "function", "function": function}


def _custom(value: dict[str, Any], shown: str) -> Tool:
    text: dict[str, Any] = {"type": "string"}
    match value.get("format"):
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            text["description"] = f"Text in this {syntax} grammar:\n{definition}"
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
    return _function({**value, "parameters": parameters}, shown)
