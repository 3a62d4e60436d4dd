"""Which role a call has, by rules over its headers, its body and its messages."""

import re
from typing import Any

from opengyre.gateway.dialects.openai_chat import OpenAIChat
from opengyre.gateway.labels import Condition, Evidence, LabelRule, role_of

BODY = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You write titles."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "No."},
    ],
    "tools": [],
    "metadata": {"turn": {"kind": "compaction"}, "n": 0},
}


def role(*conditions: Condition, headers: dict[str, str] | None = None, **body: Any) -> str:
    raw = {**BODY, **body}
    evidence = Evidence(
        header=lambda name: (headers or {}).get(name, ""),
        body=raw,
        request=OpenAIChat().parse(raw),
    )
    return role_of(evidence, [LabelRule(role="side", conditions=conditions)])


def test_a_header_must_be_there_or_match() -> None:
    there = {"x-agent": "a1"}
    assert role(Condition(header="x-agent"), headers=there) == "side"
    assert role(Condition(header="x-agent")) == "main"
    assert role(Condition(header="x-agent", is_empty=True)) == "side"
    assert role(Condition(header="x-agent", pattern=re.compile("^b")), headers=there) == "main"


def test_a_field_is_found_by_its_path_and_matched_as_json() -> None:
    assert role(Condition(field="tools", is_empty=True)) == "side"
    assert role(Condition(field="metadata.turn.kind")) == "side"
    assert role(Condition(field="metadata.turn", pattern=re.compile('"compaction"'))) == "side"
    assert role(Condition(field="metadata.turn.kind.deeper")) == "main"
    assert role(Condition(field="nowhere", is_empty=True)) == "side"


def test_zero_and_false_are_not_empty() -> None:
    assert role(Condition(field="metadata.n", is_empty=True)) == "main"
    assert role(Condition(field="stream"), stream=False) == "side"


def test_texts_of_the_system_and_of_the_last_user_are_searched() -> None:
    assert role(Condition(text="system", pattern=re.compile("titles"))) == "side"
    assert role(Condition(text="last_user", pattern=re.compile("^Fix"))) == "side"
    assert role(Condition(text="last_user", pattern=re.compile("titles"))) == "main"


def test_every_condition_must_hold_and_the_first_rule_wins() -> None:
    no_tools, titles = Condition(field="tools", is_empty=True), re.compile("titles")
    assert role(no_tools, Condition(text="system", pattern=titles)) == "side"
    assert role(no_tools, Condition(text="last_user", pattern=titles)) == "main"
    raw = dict(BODY)
    evidence = Evidence(header=lambda name: "", body=raw, request=OpenAIChat().parse(raw))
    rules = [LabelRule(role=name, conditions=(no_tools,)) for name in ("main-summary", "side")]
    assert role_of(evidence, rules) == "main-summary"
