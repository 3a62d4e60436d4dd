"""Anthropic's tools and tool choice to neutral ones.

Must not know: messages, events. Invariants: tools that only the vendor can run are dropped; one
that the client runs but whose parameters only the vendor knows is refused.
"""

from typing import Any

from opengyre.gateway.dialects.fields import refused, typed
from opengyre.gateway.request import ChoiceMode, Tool, ToolChoice

_MODES = {
    "auto": ChoiceMode.AUTO,
    "none": ChoiceMode.NONE,
    "any": ChoiceMode.REQUIRED,
    "tool": ChoiceMode.NAMED,
}
_CLIENT_RUN = ("bash_", "text_editor_", "computer_", "memory_", "browser_")


def read_tools(body: dict[str, Any]) -> tuple[Tool, ...]:
    """Raises Refusal, naming the tool."""
    tools = typed(body, "tools", list, [])
    found = [_tool(tool, f"tools[{k}]") for k, tool in enumerate(tools)]
    return tuple(tool for tool in found if tool is not None)


def read_choice(body: dict[str, Any], tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """(choice, whether calls may come in parallel). Raises Refusal for what no tool can meet."""
    value = typed(body, "tool_choice", dict, {"type": "auto"})
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise refused("tool_choice", f"tool_choice.type must be one of {', '.join(_MODES)}")
    mode = _MODES[kind]
    name = typed(value, "name", str, "") if mode is ChoiceMode.NAMED else ""
    names = [tool["function"]["name"] for tool in tools]
    if mode is ChoiceMode.NAMED and name not in names:
        raise refused("tool_choice", f"tool_choice: no tool is named {name!r}")
    if mode is ChoiceMode.REQUIRED and not tools:
        raise refused("tool_choice", "tool_choice asks for a tool, and there is none")
    is_parallel = not typed(value, "disable_parallel_tool_use", bool, False)
    return ToolChoice(mode=mode, name=name), is_parallel


def _tool(tool: Any, where: str) -> Tool | None:
    if not isinstance(tool, dict):
        raise refused(where, f"{where} must be an object")
    kind = typed(tool, "type", str, "custom")
    if kind.startswith(_CLIENT_RUN):
        raise refused(where, f"{where}: {kind} is not known here; send its input_schema instead")
    if kind != "custom":
        return None
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise refused(where, f"{where} needs a name and an input_schema")
    description = typed(tool, "description", str, "")
    told = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}
