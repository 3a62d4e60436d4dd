"""What a model of a family would sample to say something, as its own template writes it.

Owns: ids of answers. Must not know: the gateway's parser.
"""

from dataclasses import dataclass
from typing import Any

from families_under_test import family_of, reference_of, tokenizer_of

from opengyre.gateway.request import Message, Role

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "count": {"type": "number"},
                    "more": {"type": "object"},
                },
            },
        },
    }
    for name in ("bash", "edit_file")
]
SYSTEM = Message(role=Role.SYSTEM, text="Be brief.")
USER = Message(role=Role.USER, text="What is here?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a model says in a turn; `calls` are (tool, arguments)."""

    reasoning: str = "hm"
    text: str = "Look."
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def fitted(name: str, said: Said) -> Said:
    """What the family can say: Llama says a text or one call."""
    if name == "llama-3" and said.calls:
        return Said(text="", calls=said.calls[:1])
    return said


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name).encode(text, add_special_tokens=False).ids)


def text_of(name: str, ids: list[int]) -> str:
    return str(tokenizer_of(name).decode(ids, skip_special_tokens=False))


def completion(name: str, said: Said) -> list[int]:
    """The ids a model would sample, as the family's own template writes them."""
    family, reference = family_of(name), reference_of(name)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": said.text},
    ]
    if said.calls:
        chat[1]["tool_calls"] = [
            {
                "id": f"functions.{tool}:{index}",
                "type": "function",
                "function": {"name": tool, "arguments": arguments},
            }
            for index, (tool, arguments) in enumerate(said.calls)
        ]
    rendered = reference.render(chat, tools=TOOLS)
    prompt = reference.render_ids(chat[:1], tools=TOOLS, add_generation_prompt=True)
    sampled = [
        t
        for t, is_sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=False)
        if is_sampled
    ]
    ids = sampled or rendered.token_ids[len(prompt) :]
    if family.reasoning is not None:
        think, think_end = (ids_of(name, marker)[0] for marker in family.reasoning)
        if name != "inkling":
            after = max((at for at, token in enumerate(ids) if token == think_end), default=-1)
            ids = ids[after + 1 :]
        is_open = reference_opens_reasoning(name)
        thoughts = ids_of(name, (family.label + "\n" if family.label else "") + said.reasoning)
        glue = ids_of(name, family.header) if family.header else []
        ids = ([] if is_open else [think]) + thoughts + [think_end] + glue + ids
    return with_stop(name, ids, has_calls=bool(said.calls))


def with_stop(name: str, ids: list[int], *, has_calls: bool) -> list[int]:
    stops = reference_of(name).get_stop_token_ids()
    at = next((k for k, token in enumerate(ids) if token in stops), None)
    if at is not None:
        return ids[: at + 1]
    if name.startswith("glm"):
        return ids + ids_of(name, "<|observation|>" if has_calls else "<|user|>")
    return [*ids, stops[0]]


def reference_opens_reasoning(name: str) -> bool:
    family, reference = family_of(name), reference_of(name)
    prompt = reference.render_ids(
        [{"role": "user", "content": "q"}], tools=TOOLS, add_generation_prompt=True
    )
    assert family.reasoning is not None
    marks = [t for t in prompt if t in {ids_of(name, m)[0] for m in family.reasoning}]
    return bool(marks) and marks[-1] == ids_of(name, family.reasoning[0])[0]
