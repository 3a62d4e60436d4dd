# ruff: noqa: RUF001 - the wide bars are in the models' own tokens
"""The model families whose format we can extend exactly, and how each one's answers are marked.

Owns: the table, and which row a model folder belongs to. Must not know: tokens, messages, how a
renderer is made. Invariant: a folder matches one row or none; where the model's type says too
little its name or chat template decides, and nothing is guessed.
"""

import re
from dataclasses import dataclass
from enum import Enum, StrEnum

from opengyre.seams.errors import ConfigError


class Stream(StrEnum):
    """When a client sees tool calls. Text and reasoning always come as they are sampled."""

    ARGUMENTS = "arguments as they are sampled"
    CALLS = "each call at its end"
    TAIL = "calls at the answer's end"


class InReasoning(Enum):
    """What a call's marker means while reasoning is open."""

    DRAFT = "a draft if the reasoning is closed later, else the answer begins"
    PART = "part of the reasoning"
    CALL = "the answer begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headed:
    """JSON arguments that follow `head`, which has the group `name`, up to `end` or, if that is
    "", to the block's end."""

    head: re.Pattern[str]
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Arguments one by one between tags. `head` has the group `name`; `key`, up to the value's
    beginning, the group `key`; `close` ends a value. `has_lines`: a line break on either side of
    a value is the format's. `end` closes a call where a block holds several."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    close: str
    has_lines: bool = False
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One format. Markers are single tokens of the vocabulary; None: the format has none.

    `name` is its renderer's in `renderers`. Of several families of one `model_type` the model's
    name chooses, else the first whose chat template `has` the given words and `lacks` the others;
    for `types_by_name` only the name does. `section` begins the calls. `header` begins a part
    whose kind the next marker tells; `silent` markers say nothing. `opener` begins a call that no
    marker does (`is_opener_first`: only as the first characters). `named_call` is what follows a
    call's marker when the tool is known. `arguments`: the member of the call's JSON that has them,
    or how else they are written. `label` is dropped at the beginning of reasoning.
    `has_one_system`: the template has no place for a later one. `keeps_arguments`: it writes
    arguments that are no JSON object too. `has_call_ids`: the model itself names its calls.
    """

    name: str
    model_types: tuple[str, ...] = ()
    types_by_name: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    call: tuple[str, str] | None = ("<tool_call>", "</tool_call>")
    section: str | None = None
    stream: Stream = Stream.CALLS
    in_reasoning: InReasoning = InReasoning.DRAFT
    has: str = ""
    lacks: str = ""
    header: str | None = None
    silent: tuple[str, ...] = ()
    opener: str = ""
    is_opener_first: bool = False
    named_call: str | None = None
    arguments: str | Headed | Tags = "arguments"
    label: str = ""
    has_text_after_calls: bool = False
    has_one_system: bool = False
    has_call_ids: bool = False
    keeps_arguments: bool = False


_JSON_CALL = '\n{{"name": {json}, "arguments":'
_FUNCTION = "\n<function={name}>\n"
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_NAMED = "function<｜tool▁sep｜>{name}\n```json\n"
_DEEPSEEK_ARGUMENTS = Headed(
    head=re.compile(r".*?<｜tool▁sep｜>\s*(?P<name>[^\n]+?)\s*\n```(?:json)?\s", re.DOTALL),
    end="\n```",
)
_KIMI_ARGUMENTS = Headed(
    head=re.compile(r"\s*(?:[^.:]*\.)?(?P<name>[^:]+?)\s*(?::[^:]*)?<\|tool_call_argument_begin\|>")
)
_FUNCTION_TAGS = Tags(
    head=re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    key=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    close="</parameter>",
    has_lines=True,
)
_INVOKE_TAGS = Tags(
    head=re.compile(r'\s*<invoke name="(?P<name>[^"\n]+)">'),
    key=re.compile(r'<parameter name="(?P<key>[^"\n]+)">'),
    close="</parameter>",
    end="</invoke>",
)
_KEY_TAGS = Tags(
    head=re.compile(r"\s*(?P<name>[^<\n]+?)\s*(?=<arg_key>)"),
    key=re.compile(r"<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>"),
    close="</arg_value>",
)
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_QWEN35 = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_HY = ":opensource"
_HY_TAGS = Tags(
    head=re.compile(rf"\s*(?P<name>[^<\n]+?)\s*<tool_sep{_HY}>"),
    key=re.compile(rf"<arg_key{_HY}>\s*(?P<key>[^<]+?)\s*</arg_key{_HY}>\s*<arg_value{_HY}>"),
    close=f"</arg_value{_HY}>",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3",
        keeps_arguments=True,
        model_types=("qwen3", "qwen3_moe"),
        stream=Stream.ARGUMENTS,
        lacks="<function=",
        named_call=_JSON_CALL,
    ),
    Family(
        name="qwen3-vl",
        keeps_arguments=True,
        has_one_system=True,
        model_types=("qwen3_vl", "qwen3_vl_moe"),
        stream=Stream.ARGUMENTS,
        named_call=_JSON_CALL,
    ),
    Family(
        name="prime-qwen3",
        stream=Stream.ARGUMENTS,
        arguments=_FUNCTION_TAGS,
        types_by_name=("qwen3",),
        named_call=_FUNCTION,
    ),
    Family(
        name="qwen3.8",
        stream=Stream.ARGUMENTS,
        arguments=_FUNCTION_TAGS,
        model_types=_QWEN35,
        has="reasoning_effort",
        named_call=_FUNCTION,
        has_one_system=True,
    ),
    Family(
        name="qwen3.6",
        stream=Stream.ARGUMENTS,
        arguments=_FUNCTION_TAGS,
        model_types=_QWEN35,
        has="preserve_thinking",
        named_call=_FUNCTION,
        has_one_system=True,
    ),
    Family(
        name="qwen3.5",
        stream=Stream.ARGUMENTS,
        arguments=_FUNCTION_TAGS,
        model_types=_QWEN35,
        named_call=_FUNCTION,
        has_one_system=True,
    ),
    *(
        Family(
            name=name,
            types_by_name=("nemotron_h",),
            stream=Stream.ARGUMENTS,
            arguments=_FUNCTION_TAGS,
            named_call=_FUNCTION,
            has_one_system=True,
        )
        for name in ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")
    ),
    Family(
        name="glm-4.5",
        stream=Stream.ARGUMENTS,
        arguments=_KEY_TAGS,
        model_types=("glm4_moe",),
        lacks="clear_thinking",
        in_reasoning=InReasoning.CALL,
        has_text_after_calls=True,
        named_call="{name}\n",
    ),
    Family(
        name="glm-5",
        stream=Stream.ARGUMENTS,
        arguments=_KEY_TAGS,
        model_types=("glm4_moe", "glm4_moe_lite"),
        types_by_name=("glm_moe_dsa",),
        has="clear_thinking",
        in_reasoning=InReasoning.CALL,
        has_text_after_calls=True,
        named_call="{name}",
    ),
    *(
        Family(
            name=name,
            types_by_name=("glm_moe_dsa",),
            stream=Stream.ARGUMENTS,
            arguments=_KEY_TAGS,
            in_reasoning=InReasoning.CALL,
            has_text_after_calls=True,
            named_call="{name}",
        )
        for name in ("glm-5.1", "glm-5.3")
    ),
    *(
        Family(
            name=name,
            types_by_name=("laguna",),
            stream=Stream.ARGUMENTS,
            arguments=_KEY_TAGS,
            in_reasoning=InReasoning.PART,
        )
        for name in ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1")
    ),
    Family(
        name="minimax-m2",
        arguments=_INVOKE_TAGS,
        has_one_system=True,
        model_types=("minimax_m2",),
        call=("<minimax:tool_call>", "</minimax:tool_call>"),
        named_call='\n<invoke name="{name}">\n',
    ),
    Family(
        name="hy3",
        stream=Stream.ARGUMENTS,
        arguments=_HY_TAGS,
        model_types=("hy_v3",),
        reasoning=(f"<think{_HY}>", f"</think{_HY}>"),
        call=(f"<tool_call{_HY}>", f"</tool_call{_HY}>"),
        section=f"<tool_calls{_HY}>",
        in_reasoning=InReasoning.PART,
        named_call=f"{{name}}<tool_sep{_HY}>\n",
        has_one_system=True,
    ),
    Family(
        name="deepseek-r1",
        stream=Stream.ARGUMENTS,
        arguments=_DEEPSEEK_ARGUMENTS,
        keeps_arguments=True,
        model_types=("deepseek_v3",),
        call=_DEEPSEEK_CALL,
        section=_DEEPSEEK_SECTION,
        in_reasoning=InReasoning.PART,
        has="<｜Assistant｜><think>",
        named_call=_DEEPSEEK_NAMED,
    ),
    Family(
        name="deepseek-v3",
        stream=Stream.ARGUMENTS,
        arguments=_DEEPSEEK_ARGUMENTS,
        keeps_arguments=True,
        model_types=("deepseek_v3",),
        reasoning=None,
        call=_DEEPSEEK_CALL,
        section=_DEEPSEEK_SECTION,
        lacks="think",
        named_call=_DEEPSEEK_NAMED,
    ),
    Family(
        name="deepseek-v4",
        keeps_arguments=True,
        model_types=("deepseek_v4",),
        call=None,
        in_reasoning=InReasoning.PART,
        stream=Stream.TAIL,
        opener="<｜DSML｜",
    ),
    Family(
        name="kimi-k2",
        stream=Stream.ARGUMENTS,
        arguments=_KIMI_ARGUMENTS,
        keeps_arguments=True,
        model_types=("kimi_k2",),
        reasoning=None,
        call=_KIMI_CALL,
        section=_KIMI_SECTION,
        has_call_ids=True,
    ),
    Family(
        name="kimi-k2.5",
        stream=Stream.ARGUMENTS,
        arguments=_KIMI_ARGUMENTS,
        keeps_arguments=True,
        model_types=("kimi_k25",),
        call=_KIMI_CALL,
        section=_KIMI_SECTION,
        has_call_ids=True,
    ),
    Family(
        name="llama-3",
        keeps_arguments=True,
        has_one_system=True,
        model_types=("llama",),
        reasoning=None,
        call=None,
        stream=Stream.TAIL,
        has="<|start_header_id|>",
        opener="{",
        is_opener_first=True,
        named_call='{{"name": {json}, "parameters":',
    ),
    Family(
        name="gemma4",
        model_types=("gemma4", "gemma4_text"),
        reasoning=("<|channel>", "<channel|>"),
        call=("<|tool_call>", "<tool_call|>"),
        label="thought",
        has_text_after_calls=True,
        named_call="call:{name}",
    ),
    Family(
        name="inkling",
        stream=Stream.ARGUMENTS,
        arguments="args",
        model_types=("inkling_mm_model",),
        reasoning=("<|content_thinking|>", "<|end_message|>"),
        call=("<|content_invoke_tool_json|>", "<|end_message|>"),
        in_reasoning=InReasoning.CALL,
        header="<|message_model|>",
        silent=("<|content_text|>", "<|end_message|>"),
    ),
)

LEFT_OUT: dict[str, str] = {
    "gpt-oss": "its encoder is not the model folder's but one fetched from the network at start",
    "default": "renders each turn anew; `allow_rerender = true` uses it for any other folder",
    "custom": "the user's own code",
    "auto": "chooses one of the others",
}


def find_family(model_type: str, *, name: str, template: str) -> Family:
    """The row of a model of this type. `name` is a renderer's if the model's name is known to
    `renderers`, else ""; `template` its chat template, or "".

    Raises ConfigError that says what is known.
    """
    by_name = [family for family in FAMILIES if model_type in family.types_by_name]
    by_template = [family for family in FAMILIES if model_type in family.model_types]
    candidates = by_template + by_name
    for family in candidates:
        if family.name == name:
            return family
    for family in by_template:
        if family.has in template and not (family.lacks and family.lacks in template):
            return family
    if candidates:
        names = ", ".join(family.name for family in candidates)
        raise ConfigError(
            f"model_type {model_type!r} may be {names}, and neither the folder's name, nor "
            "`_name_or_path` in its config.json, nor its chat template tells which"
        )
    known = sorted(
        {one for family in FAMILIES for one in family.model_types + family.types_by_name}
    )
    raise ConfigError(f"model_type {model_type!r} is not supported (known: {', '.join(known)})")
