"""The surface as docs/openapi/gateway.json tells it, tried against a real gateway by Schemathesis.

Every answer is one that the document names, in its shape; none is a 5xx; what is no JSON, nested
without end or not a number at all is refused in the protocol's shape.
"""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from cases_rig import EACH_PROTOCOL
from cases_speakers import BASH, Entry, Said, Speaker
from gateway_rig import TOKENIZER, open_rig
from hypothesis import HealthCheck, Phase, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "docs" / "openapi" / "gateway.json").read_text())
KEY = {"authorization": "Bearer key-1"}
MARKER = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
FORCED = '\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'


def answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Short; the rest of a call where one was begun by force."""
    is_forced = prompt_ids[-len(MARKER) :] != MARKER
    text = FORCED if is_forced else "Fine.<|im_end|>"
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@dataclass
class Served:
    """A gateway in a thread of its own, so that clients that block can be used."""

    address: str = ""
    is_up: threading.Event = field(default_factory=threading.Event)
    stop: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.stop, self.loop = asyncio.Event(), asyncio.get_running_loop()
        engine = ScriptedEngine(answer, ScriptedConfig(context_tokens=8192))
        async with open_rig({"s0": engine}, max_context_tokens=8192, hold_max_s=5.0) as rig:
            self.address = rig.gateway.address
            self.is_up.set()
            await self.stop.wait()


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """The base URL of one execution."""
    served = Served()
    thread = threading.Thread(target=served.run)
    thread.start()
    assert served.is_up.wait(30)
    yield f"{served.address}/e000001"
    assert served.loop is not None
    assert served.stop is not None
    served.loop.call_soon_threadsafe(served.stop.set)
    thread.join(30)


schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.coverage.enabled = False
MAY_BE_REFUSED = re.compile(
    "prefill|tool_choice|maximum context|Previous response|holds no message|cannot hold"
)
"""What the document says in words only: a choice of a tool that is not there, and the like."""
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@schema.parametrize()
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_is_generated_from_the_document_is_answered_as_it_says(
    case: schemathesis.Case, gateway: str
) -> None:
    response = case.call(base_url=gateway, headers=KEY)
    assert response.status_code < 500, response.text
    case.validate_response(response, checks=CHECKS)
    is_valid = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_valid and response.status_code == 400:
        assert MAY_BE_REFUSED.search(response.text), response.text


@pytest.mark.parametrize("operation", ["chat", "responses", "messages"])
def test_a_streamed_answer_is_what_the_document_says(operation: str, gateway: str) -> None:
    """Whatever is generated, a stream is among it."""
    words = [{"role": "user", "content": "x"}]
    body = {"stream": True, "max_tokens": 8, "messages": words}
    if operation == "responses":
        body = {"stream": True, "input": "x"}
    case = schema.find_operation_by_id(operation).Case(body=body, media_type="application/json")
    response = case.call(base_url=gateway, headers=KEY)
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


NO_REQUEST = {
    "nothing": b"",
    "a torn object": b'{"messages": [',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "NaN": b'{"temperature": NaN, "messages": "x", "input": "x"}',
    "infinity": b'{"temperature": -Infinity, "messages": "x", "input": "x"}',
    "a number beyond floats": b'{"max_tokens": 1e999}',
    "no UTF-8": b'{"messages": "\xff\xfe", "input": "\xc3("}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "a NUL": b'{"messages": "\x00"}',
    "two objects": b"{}{}",
    "deep lists": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"input": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "deep and open": b"[" * 1_000_000,
}


@EACH_PROTOCOL
@pytest.mark.parametrize("what", NO_REQUEST)
def test_what_is_no_request_at_all_is_400_in_the_protocols_shape(
    speaker: Speaker, what: str, gateway: str
) -> None:
    response = post(gateway, speaker, NO_REQUEST[what])
    assert response.status_code == 400, response.text
    assert speaker.error_kind(response.json()) == "invalid_request_error"


def post(gateway: str, speaker: Speaker, content: bytes) -> httpx.Response:
    headers = KEY | {"content-type": "application/json"}
    url = f"{gateway}/v1/{speaker.operation}"
    return httpx.post(url, headers=headers, content=content, timeout=60.0, verify=False)


def plain(speaker: Speaker) -> dict[str, Any]:
    history: list[Entry] = [
        Said(role="system", text="s"),
        Said(role="user", text="u"),
        Said(role="user", text="v"),
    ]
    return speaker.body(history, stream=False, tools=(BASH,))


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value but its root."""
    keys = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in keys:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    copied: Any = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


DEEP: Any = []
for _ in range(400):
    DEEP = [{"a": DEEP}]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\u0000\u2028\ud83d\ude00",
    [],
    {},
    [[]],
    [None],
    {"type": "x"},
    {"type": None},
    {"type": []},
    [{"type": {}}],
    {"role": []},
    DEEP,
]


@EACH_PROTOCOL
def test_an_odd_value_at_any_place_is_answered_or_refused_and_never_an_error_of_ours(
    speaker: Speaker, gateway: str
) -> None:
    body = plain(speaker) | MORE[speaker.name]
    url = f"{gateway}/v1/{speaker.operation}"
    ours: list[tuple[Any, str, int]] = []
    with httpx.Client(headers=KEY, timeout=60.0, verify=False) as client:
        for path, odd in itertools.product(places(body), ODD):
            response = client.post(url, content=json.dumps(replaced(body, path, odd)))
            if response.status_code not in (200, 400):
                ours.append((path, str(odd)[:40], response.status_code))
            if response.status_code == 400:
                assert speaker.error_kind(response.json()) == "invalid_request_error"
    assert ours == []


CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
MORE: dict[str, dict[str, Any]] = {
    "openai-chat": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tool_choice": {"type": "function", "function": {"name": "bash"}},
        "stop": ["x"],
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    "openai-responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "x"}],
                "content": [{"type": "reasoning_text", "text": "x"}],
                "encrypted_content": "gyre1.eA==",
            },
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "parameters": {}, "description": "d"},
            {"type": "custom", "name": "p", "format": {"type": "grammar", "definition": "x"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "bash"}]},
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "instructions": "x",
    },
    "anthropic": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": "Z3lyZTE="},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c", "name": "bash", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "x"}],
                        "is_error": False,
                    }
                ],
            },
        ],
        "system": [{"type": "text", "text": "x"}],
        "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "output_config": {"effort": "high"},
    },
}


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic"])
def test_the_document_names_every_field_that_the_pages_of_the_dialects_name(name: str) -> None:
    page = (ROOT / "docs" / "dialects" / f"{name}.md").read_text()
    request = {"openai_chat": "Chat", "openai_responses": "Response", "anthropic": "Claude"}[name]
    known = DOCUMENT["components"]["schemas"][f"{request}Request"]["properties"]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (?:honoured|tolerated|refused) ", fields_of(page), re.M)
    assert len(rows) > 20
    for row in rows:
        assert row.split(".")[0] in known, f"{row} is not in the document"
    assert set(known) <= {row.split(".")[0] for row in rows}


def fields_of(page: str) -> str:
    """The table of a body's fields: that of items, blocks and tools comes after it."""
    start = page.index("| field |")
    end = page.find("\n## ", start)
    return page[start : end if end > 0 else None]


def test_every_operation_of_the_document_needs_the_executions_key(gateway: str) -> None:
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            if operation.get("security") == []:
                continue
            for headers in ({}, {"authorization": "Bearer key-2"}, {"x-api-key": "é"}):
                url = gateway + path.replace("{model}", "policy")
                encoded = {k: v.encode("latin-1") for k, v in headers.items()}
                response = httpx.request(
                    method, url, headers=encoded, content=b"{}", timeout=60.0, verify=False
                )
                assert response.status_code == 401, (path, headers)
