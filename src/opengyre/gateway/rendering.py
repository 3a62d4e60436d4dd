"""Chat messages to token ids and back, exactly, for the model families we know.

Owns: the tokenizer adapter and the choice of renderer. Must not know: sessions, engines, HTTP,
and `transformers` (its import would dominate the start). Invariants: a sampled token is never
encoded again; an unknown family is refused at start.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from opengyre.gateway.detokenize import token_bytes
from opengyre.gateway.output import AnswerParser, Markers
from opengyre.gateway.request import Message, Role, Tool
from opengyre.seams.errors import ConfigError

_MAX_CACHED_CHARS = 4096


class TokenizerAdapter:
    """A `tokenizers.Tokenizer` in the shape that `renderers` asks for."""

    def __init__(self, tokenizer: Tokenizer, *, name: str, end_of_turn: str) -> None:
        self.name_or_path = name
        self.eos_token_id: int | None = tokenizer.token_to_id(end_of_turn)
        self.unk_token_id: int | None = None
        self._tokenizer = tokenizer
        self._encode_short = lru_cache(maxsize=4096)(self._encode)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if len(text) > _MAX_CACHED_CHARS:
            return list(self._encode(text))
        return list(self._encode_short(text))

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class ModelRenderer:
    """One model's chat format. `stop_ids` end an answer."""

    def __init__(
        self, renderer: Qwen3Renderer, markers: Markers, adapter: TokenizerAdapter
    ) -> None:
        self._renderer = renderer
        self._adapter = adapter
        self._markers = markers
        self.stop_ids: list[int] = sorted(markers.stops)

    def root(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Prompt ids of a conversation rendered from its first message."""
        chat = [_chat_message(message) for message in messages]
        ids: list[int] = self._renderer.render_ids(
            chat, tools=list(tools) or None, add_generation_prompt=True
        )
        return ids

    def extend(
        self, prompt_ids: list[int], completion_ids: list[int], new_messages: Sequence[Message]
    ) -> list[int] | None:
        """Prompt ids that begin with exactly `prompt_ids + completion_ids`; None if the format
        cannot be extended by these messages."""
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, [_chat_message(message) for message in new_messages]
        )
        return None if bridged is None else bridged.token_ids

    def parser(
        self,
        *,
        stops: tuple[str, ...],
        call_id: Callable[[int], str],
        is_parallel: bool = True,
        forced: Sequence[int] = (),
    ) -> AnswerParser:
        return AnswerParser(
            self._markers, stops=stops, call_id=call_id, is_parallel=is_parallel, forced=forced
        )

    def token_bytes(self, token: int) -> bytes:
        """The text of one id; b"" for an id outside the vocabulary."""
        table = self._markers.table
        return table[token] if 0 <= token < len(table) else b""

    def forced_prefix(self, tool_name: str | None) -> list[int] | None:
        """Ids that, after a prompt, begin a call: of any tool, or of the one named.

        They belong to the prompt; the parser of the answer is told of them. None: the format
        cannot be forced.
        """
        ids = [self._markers.call]
        if tool_name is not None:
            name = json.dumps(tool_name, ensure_ascii=False)
            ids += self._adapter.encode(f'\n{{"name": {name}, "arguments":')
        return ids


def load_renderer(folder: Path) -> ModelRenderer:
    """Raises ConfigError when the folder has no tokenizer or its family is not known."""
    family = _family(folder / "config.json")
    build = _FAMILIES.get(family)
    if build is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"{folder}: model_type {family!r} is not supported (known: {known})")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a model folder needs its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for a damaged file
        raise ConfigError(f"{path}: not a readable tokenizer ({error})") from error
    return build(tokenizer, folder)


def _family(path: Path) -> str:
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as the model's config ({error})") from error
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def _qwen3(tokenizer: Tokenizer, folder: Path) -> ModelRenderer:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    more = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_response>", "</tool_response>")
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks + more}
    missing = [mark for mark, number in ids.items() if number is None]
    if missing:
        raise ConfigError(f"{folder}: its tokenizer lacks the special tokens {missing}")
    adapter = TokenizerAdapter(tokenizer, name=str(folder), end_of_turn="<|im_end|>")
    renderer = Qwen3Renderer(adapter, Qwen3RendererConfig(thinking_retention="all"))
    think, think_end, call, call_end = (ids[mark] or 0 for mark in marks)
    markers = Markers(
        think=think,
        think_end=think_end,
        call=call,
        call_end=call_end,
        stops=frozenset(renderer.get_stop_token_ids()),
        table=token_bytes(tokenizer),
    )
    return ModelRenderer(renderer, markers, adapter)


_FAMILIES: dict[str, Callable[[Tokenizer, Path], ModelRenderer]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
}


def _chat_message(message: Message) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.role is Role.TOOL:
        chat["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        chat["reasoning_content"] = message.reasoning
    if message.calls:
        chat["tool_calls"] = [
            {"function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    return chat
