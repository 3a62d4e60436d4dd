"""A family's markers as ids of one vocabulary.

Owns: looking them up, and what its renderer says of how an answer begins. Must not know: answers,
messages.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from renderers.base import ParsedResponse, RenderedTokens
from tokenizers import Tokenizer

from opengyre.gateway.rendering.detokenize import token_bytes
from opengyre.gateway.rendering.families import Family, InReasoning, Stream
from opengyre.gateway.request import Tool
from opengyre.seams.errors import ConfigError

_WORD = "x"
_CHAT = [{"role": "user", "content": _WORD}]


class Renderer(Protocol):
    """What we use of a renderer of `renderers`."""

    def render_ids(
        self, messages: Any, *, tools: list[Tool] | None = None, add_generation_prompt: bool = False
    ) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> RenderedTokens | None: ...

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse: ...

    def get_stop_token_ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """-1 for those that the family lacks. `table` has the bytes of each id, `special` are all ids
    that are more than text.

    `starts_in_reasoning`: an answer's first words are thoughts; `is_think_prompted`: because the
    prompt ends with the marker. `prompt_end` are the ids that end every prompt.
    """

    think: int = -1
    think_end: int = -1
    call: int = -1
    call_end: int = -1
    section: int = -1
    header: int = -1
    silent: frozenset[int] = frozenset()
    stops: frozenset[int]
    special: frozenset[int]
    table: list[bytes]
    stream: Stream
    in_reasoning: InReasoning
    starts_in_reasoning: bool = False
    is_think_prompted: bool = False
    has_text_after_calls: bool = False
    opener: str = ""
    is_opener_first: bool = False
    label: str = ""
    prompt_end: tuple[int, ...] = ()


def read_markers(
    family: Family, tokenizer: Tokenizer, renderer: Renderer, *, is_lenient: bool = False
) -> Markers:
    """Raises ConfigError for a marker that the vocabulary lacks, unless `is_lenient`: then the
    answers just never have it."""

    def find(marker: str | None) -> int:
        number = None if marker is None else tokenizer.token_to_id(marker)
        if number is None and marker is not None and not is_lenient:
            raise ConfigError(f"the tokenizer lacks {marker!r}, which {family.name} answers need")
        return -1 if number is None else number

    none = (None, None)
    think, think_end = map(find, family.reasoning or none)
    call, call_end = map(find, family.call or none)
    section, header = find(family.section), find(family.header)
    silent = frozenset(map(find, family.silent))
    stops = frozenset(renderer.get_stop_token_ids())
    prompt_ids, is_reasoning = _probe(tokenizer, renderer)
    is_prompted = think >= 0 and _last(prompt_ids, think) > _last(prompt_ids, think_end)
    return Markers(
        think=think,
        think_end=think_end,
        call=call,
        call_end=call_end,
        section=section,
        header=header,
        silent=silent,
        stops=stops,
        special=stops | silent | {think, think_end, call, call_end, section, header},
        table=token_bytes(tokenizer),
        stream=family.stream,
        in_reasoning=family.in_reasoning,
        starts_in_reasoning=is_reasoning or is_prompted,
        is_think_prompted=is_prompted,
        has_text_after_calls=family.has_text_after_calls,
        opener=family.opener,
        is_opener_first=family.is_opener_first,
        label=family.label,
        prompt_end=tuple(prompt_ids[_num_common(prompt_ids, renderer.render_ids(_CHAT)) :]),
    )


def _probe(tokenizer: Tokenizer, renderer: Renderer) -> tuple[list[int], bool]:
    """A prompt, and whether plain words after it are thoughts."""
    prompt_ids = renderer.render_ids(_CHAT, add_generation_prompt=True)
    ids = tokenizer.encode(_WORD, add_special_tokens=False).ids
    parsed = renderer.parse_response(list(ids), prompt_ids=prompt_ids)
    return prompt_ids, not parsed.content and bool(parsed.reasoning_content)


def _num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), len(other))


def _last(ids: list[int], token: int) -> int:
    return max((at for at, each in enumerate(ids) if each == token), default=-1)
