"""Chat messages to token ids and back, exactly, for the families of the table.

Owns: one model's renderer, what it is given and what is taken from it. Must not know: sessions,
engines, HTTP. Invariants: a sampled token is never encoded again; an extended prompt begins with
exactly the ids it extends, and extending it costs what is new, not what is old; a folder of no
known family is refused at start, unless rendering each turn anew is allowed.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import renderers
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from opengyre.gateway.rendering.call_headed import HeadedCall
from opengyre.gateway.rendering.call_json import JsonCall
from opengyre.gateway.rendering.call_tagged import TaggedCall, read_tagged
from opengyre.gateway.rendering.chat_messages import (
    chat_messages,
    with_object_arguments,
    with_one_system,
    without_system,
)
from opengyre.gateway.rendering.families import Family, Headed, Stream, Tags, find_family
from opengyre.gateway.rendering.markers import Markers, Renderer, read_markers
from opengyre.gateway.rendering.output import AnswerParser, AnswerPlan, CallReader, ReadCall
from opengyre.gateway.rendering.tokenizer import (
    TokenizerAdapter,
    read_chat_template,
    read_json,
    read_tokenizer,
)
from opengyre.gateway.request import Call, Message, Refusal, Role, Tool
from opengyre.seams.errors import ConfigError

_MAX_FORCED_TOKENS = 256
_CANNOT = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)
"""How renderers say that they cannot render or read what a client or a model wrote."""


class ModelRenderer:
    """One model's chat format. `stop_ids` end an answer; every token is below `num_ids`."""

    def __init__(
        self, renderer: Renderer, family: Family, *, adapter: TokenizerAdapter, markers: Markers
    ) -> None:
        self._renderer = renderer
        self._family = family
        self._adapter = adapter
        self._markers = markers
        self.stop_ids: list[int] = sorted(markers.stops)
        self.num_ids = len(markers.table)

    def limit(self, max_tokens: int) -> None:
        """No prompt may be longer than this; one that is far longer need not be encoded whole."""
        self._adapter.max_text_ids = max_tokens

    def root(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Prompt ids of a conversation rendered from its first message.

        Raises Refusal if the format cannot hold this conversation.
        """
        known = [self._quoted(message) for message in messages]
        known = with_one_system(known) if self._family.has_one_system else known
        known = known if self._family.keeps_arguments else with_object_arguments(known)
        calls = [call for message in known for call in message.calls]
        native_ids = [f"functions.{call.name}:{index}" for index, call in enumerate(calls)]
        chat = chat_messages(known, native_ids=native_ids if self._family.has_call_ids else ())
        try:
            return self._renderer.render_ids(
                chat, tools=list(tools) or None, add_generation_prompt=True
            )
        except _CANNOT as error:
            raise Refusal(f"this model's format cannot hold the conversation: {error}") from error

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        calls: Sequence[Call] = (),
    ) -> list[int] | None:
        """Prompt ids that begin with exactly `prompt_ids + completion_ids`: see `extension`."""
        added = self.extension(prompt_ids, completion_ids, new_messages, tools=tools, calls=calls)
        return None if added is None else [*prompt_ids, *completion_ids, *added]

    def extension(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        calls: Sequence[Call] = (),
    ) -> list[int] | None:
        """The ids that follow exactly `prompt_ids + completion_ids` in the next prompt; None if
        the format cannot be extended by these messages. `calls` are those of the sampled answer,
        which name the results among `new_messages`.

        The renderer sees no more of the prompt than its last turn, and what was forced at the
        prompt's end as the answer's beginning.
        """
        tail = list(prompt_ids[self._last_turn(prompt_ids) :])
        begin = self._answer_begin(tail)
        tail, sampled = tail[:begin], tail[begin:] + list(completion_ids)
        chat = self._new_chat(tail, sampled, new_messages, calls)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                tail, sampled, chat, tools=list(tools) or None
            )
        except _CANNOT:
            return None
        old, ids = tail + sampled, [] if bridged is None else list(bridged.token_ids)
        return ids[len(old) :] if ids and ids[: len(old)] == old else None

    def parser(
        self,
        *,
        stops: tuple[str, ...],
        call_id: Callable[[int], str],
        is_parallel: bool = True,
        forced: Sequence[int] = (),
        tools: Sequence[Tool] = (),
    ) -> AnswerParser:
        """Of one answer. `tools` tell the formats that write arguments untyped their types."""
        plan = AnswerPlan(
            stops=stops,
            call_id=call_id,
            open_call=lambda: self._open_call(tools),
            read_calls=lambda ids: self._read_calls(ids, list(tools)),
            is_parallel=is_parallel,
            forced=forced,
        )
        return AnswerParser(self._markers, plan)

    def token_bytes(self, token: int) -> bytes:
        """The text of one id; b"" for an id outside the vocabulary."""
        table = self._markers.table
        return table[token] if 0 <= token < len(table) else b""

    def forced_prefix(self, tool_name: str | None) -> list[int] | None:
        """Ids that, after a prompt, begin a call: of any tool, or of the one named.

        They belong to the prompt; the parser of the answer is told of them. None: the format
        cannot be forced so.
        """
        family, markers = self._family, self._markers
        ids = [markers.think_end] if markers.is_think_prompted else []
        ids += [marker for marker in (markers.section, markers.call) if marker >= 0]
        if tool_name is None:
            return ids if family.call is not None else None
        if family.named_call is None:
            return None
        quoted = json.dumps(tool_name, ensure_ascii=False)
        return ids + self._adapter.encode(family.named_call.format(name=tool_name, json=quoted))

    def _last_turn(self, prompt_ids: Sequence[int]) -> int:
        """Where the prompt's last stop id stands: a renderer looks no further back."""
        stops = self._markers.stops
        for at in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[at] in stops:
                return at
        return 0

    def _answer_begin(self, tail: list[int]) -> int:
        """Where the answer to a prompt begins: before its end if its beginning was forced."""
        end = list(self._markers.prompt_end)
        for at in range(len(tail), max(0, len(tail) - _MAX_FORCED_TOKENS), -1):
            if tail[max(0, at - len(end)) : at] == end:
                return at
        return len(tail)

    def _new_chat(
        self,
        tail: list[int],
        sampled: list[int],
        new_messages: Sequence[Message],
        calls: Sequence[Call],
    ) -> list[dict[str, Any]]:
        messages = [self._quoted(message) for message in new_messages]
        messages = without_system(messages) if self._family.has_one_system else messages
        answer = Message(role=Role.ASSISTANT, calls=tuple(calls))
        native_ids = self._sampled_ids(tail, sampled) if self._family.has_call_ids else []
        return chat_messages([answer, *messages], native_ids=native_ids)[1:]

    def _quoted(self, message: Message) -> Message:
        """What users, tools and instructions spell is never the end of a turn, or a call."""
        if message.role is Role.ASSISTANT:
            return message
        return msgspec.structs.replace(message, text=self._adapter.quoted(message.text))

    def _sampled_ids(self, tail: list[int], sampled: list[int]) -> list[str]:
        """What the model itself called its calls."""
        try:
            found = self._renderer.parse_response(sampled, prompt_ids=tail).tool_calls
        except _CANNOT:
            return []
        return [str(call.id) for call in found if _is_text(call.name)]

    def _open_call(self, tools: Sequence[Tool]) -> CallReader:
        match self._family.arguments:
            case Tags() as tags:
                return TaggedCall(tags, tools)
            case Headed() as headed:
                return HeadedCall(headed)
            case member:
                return JsonCall(member)

    def _read_calls(self, ids: Sequence[int], tools: list[Tool]) -> list[ReadCall]:
        arguments = self._family.arguments
        if isinstance(arguments, Tags) and arguments.end:
            return read_tagged(self._adapter.decode(ids[1:]), arguments, tools)
        block = list(ids)
        if self._markers.stream is not Stream.TAIL and self._markers.section >= 0:
            block = [self._markers.section, *block]
        try:
            found = self._renderer.parse_response(block, tools=tools or None).tool_calls
        except _CANNOT:
            return []
        return [(call.name, _as_json(call.arguments)) for call in found if _is_text(call.name)]


def load_renderer(folder: Path, *, allow_rerender: bool = False) -> ModelRenderer:
    """Raises ConfigError when the folder has no tokenizer, or its family cannot be extended and
    `allow_rerender` is not set."""
    tokenizer = read_tokenizer(folder)
    template = read_chat_template(folder)
    config = read_json(folder / "config.json")
    name = _known_name(folder, config)
    try:
        family = find_family(
            str(config.get("model_type", "")),
            name=MODEL_RENDERER_MAP.get(name, ""),
            template=template,
        )
    except ConfigError as error:
        if allow_rerender:
            from opengyre.gateway.rendering.rerender import load_rerenderer

            return load_rerenderer(folder, tokenizer)
        hint = (
            "gateway.allow_rerender = true (gyre gateway: --allow-rerender) renders each turn "
            "anew, so no turn extends another"
        )
        raise ConfigError(f"{folder}: {error}; {hint}") from error
    adapter = TokenizerAdapter(tokenizer, name=name or str(folder), chat_template=template)
    renderer = make_renderer(family, tokenizer, adapter)
    renderer.num_ids = max(renderer.num_ids, _num_ids(config))
    return renderer


def _num_ids(config: dict[str, Any]) -> int:
    """Rows of the embedding, which may be more than the tokenizer has ids for."""
    inner = config.get("text_config")
    told = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return told if isinstance(told, int) else 0


def make_renderer(family: Family, tokenizer: Tokenizer, adapter: TokenizerAdapter) -> ModelRenderer:
    """Raises ConfigError when the vocabulary lacks what the family needs."""
    kind = type(config_from_name(family.name))
    config = kind(thinking_retention="all")
    try:
        renderer = getattr(renderers, kind.__name__.removesuffix("Config"))(adapter, config)
        markers = read_markers(family, tokenizer, renderer)
    except (AssertionError, *_CANNOT) as error:
        raise ConfigError(f"{adapter.name_or_path}: no {family.name} tokenizer: {error}") from error
    return ModelRenderer(renderer, family, adapter=adapter, markers=markers)


def _known_name(folder: Path, config: dict[str, Any]) -> str:
    """The name that `renderers` knows the model by, "" for none: from its config, from a folder
    that is named like it, or from a download cache's `models--OWNER--NAME`."""
    told = str(config.get("_name_or_path", ""))
    parts = {part.lower() for part in folder.resolve().parts}
    for name in MODEL_RENDERER_MAP:
        is_cached = "models--" + name.lower().replace("/", "--") in parts
        if name == told or is_cached or name.rpartition("/")[2].lower() == folder.name.lower():
            return str(name)
    return ""


def _is_text(name: object) -> bool:
    return isinstance(name, str) and bool(name) and _is_encodable(name)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _as_json(arguments: object) -> str:
    """What a reader made of a call's arguments; a string is what it could not read."""
    if arguments is None:
        return "{}"
    text = (
        str(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    return text if _is_encodable(text) else json.dumps(arguments)
