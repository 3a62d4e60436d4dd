"""Tokens to what a client may see: increments, stop strings, reasoning, calls."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from opengyre.gateway.detokenize import TextDecoder, token_bytes
from opengyre.gateway.output import AnswerParser, read_call
from opengyre.gateway.rendering import TokenizerAdapter, load_renderer
from opengyre.gateway.request import Call, CallPiece, Ending, ReasoningPiece, TextPiece
from opengyre.gateway.visible import VisibleText

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
RENDERER = load_renderer(MODEL)
TABLE = token_bytes(TOKENIZER)
REFERENCE = Qwen3Renderer(
    TokenizerAdapter(TOKENIZER, name="m", end_of_turn="<|im_end|>"), Qwen3RendererConfig()
)
GOOD_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PARTS = [
    " ", "\n\n", "words é😀", "<think>", "</think>", "<tool_response>", GOOD_CALL, "\n", "x",
    '<tool_call>{"name": "b", "arguments": {}}</tool_call>',
]  # fmt: skip


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def parser(*stops: str) -> AnswerParser:
    return RENDERER.parser(stops=stops, call_id=lambda index: f"c{index}")


def parsed(text: str, *stops: str, end: str = "<|im_end|>") -> AnswerParser:
    """A parser that was fed all of `text`; its pieces must add up to its message."""
    one = parser(*stops)
    pieces: list[Any] = []
    for token in ids_of(text + end):
        pieces += one.feed(token)
    pieces += one.finish()
    message = one.message()
    assert "".join(p.text for p in pieces if isinstance(p, TextPiece)) == message.text
    thoughts = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
    assert thoughts == (message.reasoning or "")
    assert tuple(p.call for p in pieces if isinstance(p, CallPiece)) == message.calls
    return one


@given(st.lists(st.integers(min_value=0, max_value=len(TABLE) + 3), max_size=40))
def test_increments_join_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    decoder = TextDecoder(TABLE)
    text = "".join(decoder.feed(token) for token in ids) + decoder.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(st.text(alphabet="ab \n", max_size=30), st.lists(st.text("ab ", min_size=1), max_size=3))
def test_increments_join_to_the_stripped_text_before_the_first_stop(
    text: str, stops: list[str]
) -> None:
    visible = VisibleText(tuple(stops))
    shown = "".join(visible.feed(char) for char in text) + visible.flush()
    # of two stops the one that ends first counts: the later one had not been written yet
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    first_end = min((end for end, _ in ends), default=None)
    cut = len(text) if first_end is None else min(at for end, at in ends if end == first_end)
    assert shown == text[:cut].strip()
    assert visible.is_stopped is bool(ends)


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=7))
def test_answers_parse_as_the_reference_renderer_parses_them(parts: list[str]) -> None:
    text = "".join(parts)
    message = parsed(text).message()
    reference = REFERENCE.parse_response(ids_of(text + "<|im_end|>"))
    assert message.text == reference.content
    assert (message.reasoning or "").strip() == (reference.reasoning_content or "").strip()
    names = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert names == [(call.name, call.arguments) for call in reference.tool_calls]


def test_arguments_stay_as_they_were_written() -> None:
    arguments = '{"b" : 5000.0,  "a":"\\u00e9", "name": {"arguments": [1, {}]}}'
    raw = f'{{"x": [1, 2], "name": "bash", "arguments": {arguments} }}'
    assert read_call(raw) == ("bash", arguments)
    assert read_call('{"name": "bash"}') == ("bash", "{}")
    assert read_call('{"arguments": "{\\"a\\": 1}", "name": "n"}') == ("n", '{"a": 1}')


def test_a_malformed_call_is_never_repaired() -> None:
    raw = '{"name": "bash", "arguments": {"command": "ls"}'
    one = parsed(f"<tool_call>\n{raw}\n</tool_call>")
    assert one.message().calls == (Call(call_id="c0", name="bash", arguments=raw),)
    assert one.ending(is_cut=False) is Ending.CALLS


def test_a_call_without_a_name_is_text() -> None:
    one = parsed("<tool_call>[1, 2]</tool_call>")
    assert one.message().text == "<tool_call>[1, 2]</tool_call>"
    assert one.ending(is_cut=False) is Ending.STOP


def test_an_answer_cut_inside_a_call_gives_what_there_was() -> None:
    one = parsed('<tool_call>\n{"name": "bash", "arguments": {"comm', end="")
    assert one.message().calls[0].arguments == '{"name": "bash", "arguments": {"comm'
    assert one.ending(is_cut=True) is Ending.LENGTH


def test_an_unfinished_character_at_the_end_is_shown_as_replaced() -> None:
    one = parser()
    for token in ids_of("é")[:1]:
        one.feed(token)
    one.finish()
    assert one.message().text in ("\ufffd", "é")


def test_nothing_is_read_after_a_stop_string() -> None:
    one = parsed("abc STOP def", "STOP")
    assert one.is_stop_string
    assert one.message().text == "abc"
