"""What the gateway's address gives to whom: keys, paths, bad bodies, limits."""

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from gateway_rig import TOOLS, Rig, open_rig, scripted

from opengyre.gateway.body import MAX_BODY_BYTES
from opengyre.gateway.gateway import SamplingDefaults
from opengyre.seams.errors import BoundaryError, ConfigError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GOOD = {"authorization": "Bearer key-1"}


async def post(rig: Rig, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> Any:
    async with httpx.AsyncClient() as client:
        content = more.pop("content", None) or json.dumps({**CHAT, **more})
        url = f"{rig.gateway.address}{path}"
        return await client.post(url, headers=GOOD if headers is None else headers, content=content)


def error(answer: Any) -> tuple[int, str, str | None]:
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return answer.status_code, told["type"], told["param"]


def test_only_an_executions_own_key_opens_its_path() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            rig.gateway.open_session("e000002", "key-2", "s0", seed=1)
            path = "/e000001/v1/chat/completions"
            assert (await post(rig, path)).status_code == 200
            assert (await post(rig, path, headers={"x-api-key": "key-1"})).status_code == 200
            for headers in ({}, {"authorization": "Bearer key-2"}, {"authorization": "Bearer -"}):
                assert error(await post(rig, path, headers=headers))[0] == 401
            unknown = await post(rig, "/e000009/v1/chat/completions")
            wrong = await post(rig, "/e000002/v1/chat/completions")
            assert unknown.status_code == 401
            assert unknown.json() == wrong.json()

    asyncio.run(main())


def test_any_prefix_leads_to_the_same_calls_and_nothing_else_is_exposed() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            for path in ("/e000001/chat/completions", "/e000001/a/b/v1/chat/completions?x=1"):
                assert (await post(rig, path)).status_code == 200
            for path in ("/e000001/v1/completions", "/e000001/sleep", "/e000001/", "/e000001"):
                assert error(await post(rig, path))[0] == 404
            async with httpx.AsyncClient(headers=GOOD) as client:
                models = f"{rig.gateway.address}/e000001/v1/models"
                assert (await client.get(models)).json()["data"][0]["id"] == "policy"
                head = await client.head(models)
                assert (head.status_code, head.content) == (200, b"")
                assert (await client.get(f"{rig.gateway.address}/")).status_code == 401

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'{"messages": NaN}',
        b'{"messages": "\xff"}',
        b"[" * 100_000,
        b'{"a":1e999}',
    ],
)
def test_what_is_not_strict_json_is_refused_in_the_protocols_shape(content: bytes) -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            answer = await post(rig, "/e000001/v1/chat/completions", content=content or b" ")
            assert error(answer)[:2] == (400, "invalid_request_error")
            assert rig.recorder.records == []

    asyncio.run(main())


def test_half_of_a_surrogate_pair_loses_no_execution() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            content = rb'{"messages": [{"role": "user", "content": "\ud83d cut \ud83d\ude00"}]}'
            answer = await post(rig, "/e000001/v1/chat/completions", content=content)
            assert answer.status_code == 200

    asyncio.run(main())


def test_a_body_beyond_the_limit_is_413_and_one_of_30_mb_passes() -> None:
    async def main() -> None:
        rigged = open_rig({"s0": scripted(lambda text, seed: "hi")})
        async with rigged as rig:
            path = "/e000001/v1/chat/completions"
            too_large = b" " * (MAX_BODY_BYTES + 1)
            assert error(await post(rig, path, content=too_large))[0] == 413
            padded = json.dumps(CHAT).encode() + b" " * (30 * 10**6)
            assert (await post(rig, path, content=padded)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"1": 5}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("stop", [1]),
        ("messages", []),
        ("stream", "yes"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(field: str, value: Any) -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            answer = await post(rig, "/e000001/v1/chat/completions", **{field: value})
            assert error(answer) == (400, "invalid_request_error", field)

    asyncio.run(main())


def test_a_prompt_beyond_the_context_is_the_error_that_harnesses_know() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "word " * 100)
        async with open_rig({"s0": engine}, max_context_tokens=60) as rig, rig.client() as client:
            long = [{"role": "user", "content": "word " * 60}]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=long)
            assert refused.value.code == "context_length_exceeded"
            short = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(model="m", messages=short)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.total_tokens == 60

    asyncio.run(main())


def test_no_turn_outgrows_the_smallest_engine() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "hi", context_tokens=20)
        async with open_rig({"s0": engine}) as rig:
            answer = await post(rig, "/e000001/v1/chat/completions", tools=TOOLS)
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_a_disk_that_refuses_a_record_ends_the_gateway_at_once() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:

            def full(record: Any) -> Any:
                raise BoundaryError("tokens", "no space left on device", retryable=False)

            rig.recorder.append = full  # type: ignore[method-assign]
            await post(rig, "/e000001/v1/chat/completions")
            await asyncio.sleep(5)

    async def limited() -> None:
        async with asyncio.timeout(4):
            await main()

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(limited())
    assert raised.group_contains(BoundaryError, match="no space left")


def test_a_stop_string_ends_the_text_before_it_and_the_request_at_its_engine() -> None:
    async def main() -> None:
        engine = scripted(lambda text, seed: "one two END three four", tokens_per_s=200)
        async with open_rig({"s0": engine}) as rig, rig.client() as client:
            answer = await client.chat.completions.create(
                model="m", messages=CHAT["messages"], stop=["END", "never"]
            )
            assert answer.choices[0].message.content == "one two"
            assert answer.choices[0].finish_reason == "stop"
            assert engine.stats().num_running == 0
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert record.header.is_committed
            assert len(record.logprobs) == record.header.spans[-1].end

    asyncio.run(main())


def test_defaults_apply_only_where_the_client_is_silent() -> None:
    async def main() -> None:
        seen = []

        class Watched:
            def __init__(self) -> None:
                self.inner = scripted(lambda text, seed: "word " * 50)

            def submit(self, request: Any) -> Any:
                seen.append(request)
                return self.inner.submit(request)

            def caps(self) -> Any:
                return self.inner.caps()

        defaults = SamplingDefaults(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.02, max_new_tokens=5
        )
        async with open_rig({"s0": Watched()}, defaults=defaults) as rig:
            path = "/e000001/v1/chat/completions"
            await post(rig, path)
            told = {"temperature": 0, "top_p": 1, "top_k": 2, "min_p": 0.1}
            await post(rig, path, **told, max_completion_tokens=9)
            values = [(r.temperature, r.top_p, r.top_k, r.min_p, r.max_new_tokens) for r in seen]
            assert values == [(0.5, 0.9, 7, 0.02, 5), (0.0, 1.0, 2, 0.1, 9)]
            headers = [one.header for one in rig.recorder.records]
            assert [one.min_p for one in headers] == [0.02, 0.1]
            assert seen[0].seed != seen[1].seed
            assert seen[0].stop_ids

    asyncio.run(main())


def test_a_port_in_use_is_the_users_error_and_names_the_key() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=r"gateway\.port"):
                async with open_rig({"s0": scripted(lambda text, seed: "hi")}, port=port):
                    pass

    asyncio.run(main())


def test_tools_named_none_are_left_out_of_the_prompt() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hi")}) as rig:
            path = "/e000001/v1/chat/completions"
            await post(rig, path, tools=TOOLS)
            await post(rig, path, tools=TOOLS, tool_choice="none")
            await rig.gateway.close_session("e000001")
            sizes = [
                r.header.num_kept_tokens + r.header.num_new_prompt_tokens for r in rig.committed()
            ]
            assert sizes[1] < sizes[0] - 10

    asyncio.run(main())
