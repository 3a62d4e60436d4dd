"""Responses through the official SDK over real HTTP, against scripted engines."""

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import openai
import openai.types.responses as sdk
import pytest
from gateway_rig import CutEngine, PlainTokenizer, Rig, open_rig, scripted
from pydantic import TypeAdapter

from opengyre.engines.scripted import ScriptedEngine
from opengyre.seams.engine import Chunk, Engine, Finish, GenerateRequest
from opengyre.trajectory.turns import ForkReason

Item = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(sdk.ResponseStreamEvent)
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "bash",
        "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "sub-agents",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "custom", "name": "apply_patch", "description": "patches"},
]
CODEX: dict[str, Any] = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "prompt_cache_key": "k",
}
ODD_CALLS = [
    ("bash", '{"command": "ls"}'),
    ("bash", '{"timeout": 5000.0, "command": "ls"}'),
    ("bash", '{ "command" :  "echo  \\u00e9\\ud83d\\ude00" }'),
    ("bash", '{"command":"a\\tb", "n": 1.50}'),
    ("agents__spawn", '{"z": "x", "flag": true, "deep": {"b": [1.0, null], "a": ""}}'),
    ("bash", '{"command": "not closed}'),
    ("apply_patch", '{"input":  "*** Begin\\n\\u00e9"}'),
    ("apply_patch", '{"patch": "no input"}'),
]
USER: Item = {"role": "user", "content": [{"type": "input_text", "text": "Do it."}]}
START: list[Item] = [{"role": "developer", "content": "You act."}, USER]


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def odd_answer(text: str, seed: int) -> str:
    """Depends on the text alone, so that a continued answer is the same."""
    dice = random.Random(text)
    thinking = dice.choice(["", "<think>\nfirst ls\n\n</think>\n\n", "<think>\n\n</think>\n\n"])
    words = dice.choice(["", "Let me look.  \n", "ünïcode 😀\n\n"])
    calls = [call_text(*dice.choice(ODD_CALLS)) for _ in range(dice.choice([1, 1, 2]))]
    return thinking + words + "\n".join(calls)


PARTS = "<think>\nhmm, well\n</think>\n\nLet me see.\n\n" + "\n".join(
    call_text(*ODD_CALLS[k]) for k in (2, 4, 6)
)


async def ask(client: openai.AsyncOpenAI, given: list[Item], **more: Any) -> sdk.Response:
    """The response of a stream whose events are checked on the way."""
    body = {"input": given, "tools": TOOLS, **CODEX, **more}
    stream = await client.responses.create(model="m", stream=True, extra_body=body)
    events = [event async for event in stream]
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict())
        assert event.sequence_number == number
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    response: sdk.Response = events[-1].response
    return response


def items_of(response: sdk.Response) -> list[Item]:
    return [item.to_dict() for item in response.output]


def results(items: list[Item]) -> list[Item]:
    found = []
    for item in items:
        if item["type"] in ("function_call", "custom_tool_call"):
            kind = f"{item['type']}_output"
            found.append({"type": kind, "call_id": item["call_id"], "output": f"of {item['name']}"})
    return found


def as_sent(items: list[Item]) -> list[Item]:
    return items


def as_codex_sends(items: list[Item]) -> list[Item]:
    """Keys in another order, status and null content differ."""
    found = []
    for item in items:
        changed = {key: item[key] for key in sorted(item, reverse=True) if key != "status"}
        found.append({**changed, "content": item.get("content")})
    return found


def as_references(items: list[Item]) -> list[Item]:
    """As clients do that trust `store`."""
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def without_ids_and_reasoning(items: list[Item]) -> list[Item]:
    """Only the id of a custom call tells that its input are the arguments as they were sampled."""
    return [
        {key: value for key, value in item.items() if key != "id" or value.startswith("ctr_")}
        for item in items
        if item["type"] != "reasoning"
    ]


def rewritten_in_form(items: list[Item]) -> list[Item]:
    """Arguments compact and sorted, 5000.0 as 5000; the message as a plain string."""
    found = []
    for item in copy.deepcopy(items):
        if item["type"] == "function_call":
            try:
                value = json.loads(
                    item["arguments"],
                    parse_float=lambda t: float(t) if float(t) % 1 else int(float(t)),
                )
                item["arguments"] = json.dumps(value, sort_keys=True, separators=(",", ":"))
            except ValueError:
                pass
        if item["type"] == "message":
            item["content"] = item["content"][0]["text"]
        found.append(item)
    return found


def check_one_branch(rig: Rig, num_turns: int) -> None:
    records = rig.recorder.records
    assert len(records) == num_turns
    before: list[int] = []
    for k, record in enumerate(records):
        prompt = rig.prompt_of(record)
        assert prompt[: len(before)] == before, f"turn {k + 1}"
        assert (record.header.num_kept_tokens, record.header.fork_reason) == (len(before), "")
        before = prompt + record.completion_ids


def play(rewrite: Callable[[list[Item]], list[Item]], **more: Any) -> None:
    async def main() -> None:
        engine = scripted(odd_answer, context_tokens=100_000)
        async with (
            open_rig({"s0": engine}, max_context_tokens=100_000) as rig,
            rig.client() as client,
        ):
            given = list(START)
            for _ in range(20):
                items = items_of(await ask(client, given, **more))
                given += [*rewrite(items), *results(items)]
            await rig.gateway.close_session("e000001")
        check_one_branch(rig, 20)

    asyncio.run(main())


def test_case_01_ids_and_logprobs_are_the_engines_streamed_and_not() -> None:
    async def main() -> None:
        engine = CutEngine(scripted(lambda text, seed: PARTS), num_tokens=10_000, num_cuts=0)
        async with open_rig({"s0": engine}) as rig, rig.client() as client:
            streamed = await ask(client, START)
            whole = await client.responses.create(model="m", input="Do it.", tools=TOOLS)
            await rig.gateway.close_session("e000001")
            assert (whole.output_text, streamed.output_text) == ("Let me see.", "Let me see.")
            for response, record, request in zip(
                (streamed, whole), rig.recorder.records, engine.requests, strict=True
            ):
                assert record.header.protocol == "openai-responses"
                assert rig.prompt_of(record) == request.prompt_ids
                assert PlainTokenizer().decode(record.completion_ids) == PARTS + "<|im_end|>"
                assert len(record.logprobs) == len(record.completion_ids)
                assert response.usage is not None
                assert response.usage.input_tokens == len(request.prompt_ids)
                assert response.usage.output_tokens == len(record.completion_ids)

    asyncio.run(main())


@pytest.mark.parametrize(
    "rewrite",
    [as_sent, as_codex_sends, as_references, without_ids_and_reasoning, rewritten_in_form],
)
def test_case_02_over_20_turns_every_prompt_begins_with_all_that_was_before(
    rewrite: Callable[[list[Item]], list[Item]],
) -> None:
    play(rewrite)


def test_case_02_reasoning_that_was_asked_for_as_content_keeps_the_branch() -> None:
    play(as_sent, store=True, include=[], reasoning=None)


def test_case_02_a_chain_of_previous_responses_is_one_branch() -> None:
    async def main() -> None:
        engine = scripted(odd_answer, context_tokens=100_000)
        async with (
            open_rig({"s0": engine}, max_context_tokens=100_000) as rig,
            rig.client() as client,
        ):
            response = await ask(client, [USER], instructions="You act.", store=True)
            for _ in range(6):
                given = results(items_of(response))
                response = await ask(
                    client, given, instructions="You act.", previous_response_id=response.id
                )
            await rig.gateway.close_session("e000001")
            check_one_branch(rig, 7)
            last = PlainTokenizer().decode(rig.prompt_of(rig.recorder.records[-1]))
            assert last.count("You act.") == 1

    asyncio.run(main())


def test_instructions_are_not_inherited_from_a_previous_response() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "fine")}) as rig,
            rig.client() as client,
        ):
            first = await ask(client, [USER], instructions="Be kind.")
            await ask(client, [USER], previous_response_id=first.id)
            await ask(client, [USER], previous_response_id=first.id, instructions="Be curt.")
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [USER], previous_response_id="resp_e000001_t99_a0")
            assert refused.value.code == "previous_response_not_found"
            await rig.gateway.close_session("e000001")
            texts = [PlainTokenizer().decode(rig.prompt_of(r)) for r in rig.recorder.records]
            assert ["Be kind." in text for text in texts] == [True, False, False]
            assert texts[2].index("Be curt.") < texts[2].index("fine")
            assert all(text.count("fine") == 1 for text in texts[1:])

    asyncio.run(main())


def test_case_03_arguments_of_another_meaning_fork_with_a_reason_and_keep_both_turns() -> None:
    async def main() -> None:
        answer = call_text("agents__spawn", '{"message": "ls"}')
        async with (
            open_rig({"s0": scripted(lambda text, seed: answer)}) as rig,
            rig.client() as client,
        ):
            items = items_of(await ask(client, START))
            changed = [{**items[0], "arguments": '{"message": "pwd"}'}]
            elsewhere = [{**items[0], "namespace": None, "name": "spawn"}]
            for sent in (changed, elsewhere, items):
                await ask(client, [*START, *sent, *results(items)])
            await rig.gateway.close_session("e000001")
            one, two, three, four = rig.told
            assert (one.fork_reason, four.fork_reason, four.parent) == ("", "", one.turn)
            assert two.fork_reason == ForkReason.REWRITTEN_TURN
            assert three.fork_reason == ForkReason.REWRITTEN_TURN

    asyncio.run(main())


def test_case_04_parallel_results_in_any_order_attach_to_the_same_parent() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: PARTS)}) as rig,
            rig.client() as client,
        ):
            items = items_of(await ask(client, START))
            done = results(items)
            assert [item["type"] for item in done] == [
                "function_call_output",
                "function_call_output",
                "custom_tool_call_output",
            ]
            calls = len(items) - len(done)
            between = [item for pair in zip(items[calls:], done, strict=True) for item in pair]
            for sent in (items + done, items + done[::-1], items[:calls] + between):
                await ask(client, [*START, *sent])
            await rig.gateway.close_session("e000001")
            assert [turn.parent for turn in rig.told[1:]] == ["e000001.t1"] * 3
            assert not any(turn.fork_reason for turn in rig.told)
            texts = [PlainTokenizer().decode(rig.prompt_of(r)) for r in rig.recorder.records[1:]]
            orders = [[text.index(f"of {name}\n") for name in ("bash", "spawn")] for text in texts]
            assert [order == sorted(order) for order in orders] == [True, False, True]

    asyncio.run(main())


def test_case_05_ids_and_empty_content_in_any_form_cause_no_fork() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: call_text(*ODD_CALLS[0]))}) as rig,
            rig.client() as client,
        ):
            items = items_of(await ask(client, START))
            empty: Item = {"type": "message", "role": "assistant", "content": []}
            user = {**USER, "id": "msg_other", "type": "message", "content": "Do it."}
            for sent in (
                [{**items[0], "id": None, "status": None}],
                [{**items[0], "namespace": None, "id": "fc_other"}],
                [empty, *items],
                [{**empty, "content": ""}, *items],
                [{"type": "reasoning", "id": "rs_1", "summary": []}, *items],
            ):
                await ask(
                    client, [START[0], user, *sent, *results(items)], prompt_cache_key="other"
                )
            await rig.gateway.close_session("e000001")
            assert [turn.parent for turn in rig.told[1:]] == ["e000001.t1"] * 5
            assert not any(turn.fork_reason for turn in rig.told)

    asyncio.run(main())


async def post(rig: Rig) -> list[Item]:
    """Events of the first call, whose stream may be cut."""
    body = json.dumps({"stream": True, "input": START, "tools": TOOLS, **CODEX})
    data = b""
    url = f"{rig.gateway.address}/e000001/v1/responses"
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        async with (
            httpx.AsyncClient(headers={"authorization": "Bearer key-1"}) as client,
            client.stream("POST", url, content=body) as told,
        ):
            async for chunk in told.aiter_raw():
                data += chunk
    lines = data.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


class DyingEngine:
    """Gives nothing more for good once what it gave of its first answer holds `text`."""

    def __init__(self, inner: Any, text: str) -> None:
        self.inner = inner
        self._text = text
        self._first = ""
        self._given: list[int] = []
        self._is_dead = False

    async def submit(self, request: GenerateRequest) -> Any:
        name = request.request_id.partition(".i")[0]
        self._first = self._first or name
        if name != self._first:
            async for chunk in self.inner.submit(request):
                yield chunk
            return
        if not self._is_dead:
            async for chunk in self.inner.submit(request):
                self._given += chunk.ids
                yield chunk
                if self._text in PlainTokenizer().decode(self._given):
                    break
        self._is_dead = True
        yield Chunk(finish=Finish.ERROR, reason="dead")

    def caps(self) -> Any:
        return self.inner.caps()

    async def cancel(self, request_id: str) -> None:
        await self.inner.cancel(request_id)


CUTS = {
    "inside the text": "Let me",
    "inside the first call": "echo",
    "after a call": "</tool_call>",
    "inside the second call": '"agents',
}


@pytest.mark.parametrize("cut", CUTS)
def test_case_08_a_history_that_keeps_finished_items_goes_on_from_their_tokens(cut: str) -> None:
    """As Codex does it: what is done stays, calls were run, and the rest is asked for again."""

    async def main() -> None:
        def respond(text: str, seed: int) -> str:
            return "All is done." if "<tool_response>" in text else PARTS

        engine: Any = DyingEngine(scripted(respond), CUTS[cut])
        async with open_rig({"s0": engine}, hold_max_s=0.2) as rig, rig.client() as client:
            events = await post(rig)
            kept = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            given = [*START, *kept, *results(kept)]
            items = items_of(await ask(client, given))
            await ask(client, [*given, *items, USER])
            await rig.gateway.close_session("e000001")
            first, second, third = rig.recorder.records
            prompt = rig.prompt_of(second)
            num_prompt = len(first.new_prompt_ids)
            assert prompt[:num_prompt] == first.new_prompt_ids
            seen = PlainTokenizer().decode(prompt[num_prompt:])
            assert PARTS.startswith(seen.partition("<|im_end|>")[0])
            done = "All is done." if results(kept) else PARTS
            assert PlainTokenizer().decode(second.completion_ids) in f"{done}<|im_end|>"
            texts = [i["content"][0]["text"] for i in (*kept, *items) if i["type"] == "message"]
            assert texts == ["Let me see.", *(["All is done."] if results(kept) else [])]
            assert (third.header.parent, third.header.fork_reason) == (second.header.turn, "")
            assert rig.prompt_of(third)[: len(prompt)] == prompt

    asyncio.run(main())


@pytest.mark.parametrize("finish", [Finish.FROZEN, Finish.ERROR])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_case_09_a_stream_goes_on_wherever_its_engine_leaves(
    num_tokens: int, finish: Finish
) -> None:
    async def main() -> None:
        plain = scripted(lambda text, seed: PARTS)
        cut = CutEngine(scripted(lambda text, seed: PARTS), num_tokens=num_tokens, finish=finish)
        told = []
        engines: list[Engine] = [plain, cut]  # type: ignore[list-item]
        for engine in engines:
            async with open_rig({"s0": engine}) as rig:
                told.append(await post(rig))
        whole, continued = told
        assert len(cut.requests) > 5
        for event in (*whole, *continued):
            event.get("response", {}).pop("created_at", None)
        assert continued == whole
        assert {"reasoning", "message", "function_call", "custom_tool_call"} == {
            item["type"] for item in whole[-1]["response"]["output"]
        }

    asyncio.run(main())


def test_case_15_increments_come_as_they_are_sampled_and_the_sdk_puts_them_together() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: PARTS)}) as rig,
            rig.client() as client,
        ):
            async with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
                counts: dict[str, int] = {}
                async for event in stream:
                    counts[event.type] = counts.get(event.type, 0) + 1
                final = await stream.get_final_response()
            assert counts["response.reasoning_text.delta"] > 1
            assert counts["response.output_text.delta"] > 1
            assert counts["response.function_call_arguments.delta"] > 4
            assert final.output_text == "Let me see."
            assert final.usage is not None
            assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
            calls = [item for item in final.output if item.type == "function_call"]
            assert [(call.name, call.namespace) for call in calls] == [
                ("bash", None),
                ("spawn", "agents"),
            ]
            assert calls[0].arguments == ODD_CALLS[2][1]
            (custom,) = [item for item in final.output if item.type == "custom_tool_call"]
            assert custom.input == "*** Begin\né"

    asyncio.run(main())


def test_case_13_a_count_of_input_tokens_is_the_prompts_length() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: PARTS)}) as rig,
            rig.client() as client,
        ):
            body: dict[str, Any] = {"model": "m", "instructions": "You act.", "tools": TOOLS}
            counted = await client.responses.input_tokens.count(input="hi", **body)
            answer = await client.responses.create(input="hi", **body)
            again = await client.responses.input_tokens.count(
                input=results(items_of(answer)), previous_response_id=answer.id, **body
            )
            next_one = await client.responses.create(
                input=results(items_of(answer)), previous_response_id=answer.id, **body
            )
            assert answer.usage is not None
            assert next_one.usage is not None
            assert counted.input_tokens == answer.usage.input_tokens
            assert again.input_tokens == next_one.usage.input_tokens
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [{"type": "item_reference", "id": "fc_e000001_t9_a0_0"}])
            assert refused.value.code == "item_not_found"
            await rig.gateway.close_session("e000001")
            assert len(rig.told) == 2

    asyncio.run(main())


def test_sealed_reasoning_is_read_by_a_gateway_that_never_saw_the_turn() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: PARTS)}) as rig,
            rig.client() as client,
        ):
            items = items_of(await ask(client, START, reasoning=None))
        assert items[0]["encrypted_content"].startswith("gyre1.")
        items[0]["content"] = None
        async with (
            open_rig({"s0": scripted(lambda text, seed: "ok")}) as rig,
            rig.client() as client,
        ):
            await ask(client, [*START, *items, *results(items)])
            await rig.gateway.close_session("e000001")
            (record,) = rig.recorder.records
            assert "<think>\nhmm, well\n</think>" in PlainTokenizer().decode(record.new_prompt_ids)

    asyncio.run(main())


def test_an_answer_at_its_limit_is_incomplete_and_its_turn_is_committed() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "word " * 50)}) as rig,
            rig.client() as client,
        ):
            response = await ask(client, START, max_output_tokens=5)
            assert response.status == "incomplete"
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.usage is not None
            assert response.usage.output_tokens == 5
            await rig.gateway.close_session("e000001")
            assert [(t.finish, t.is_committed) for t in rig.told] == [("length", True)]

    asyncio.run(main())


def call_of_forced(prompt_ids: list[int], seed: int) -> list[int]:
    """The rest of a call that the prompt has begun."""
    tokenizer = PlainTokenizer()
    begun = tokenizer.decode(prompt_ids).rpartition("<|im_start|>assistant\n")[2]
    whole = call_text(*ODD_CALLS[4])
    assert begun
    assert whole.startswith(begun)
    return tokenizer.encode(whole[len(begun) :] + "<|im_end|>")


def test_a_forced_call_is_called_and_a_single_one_ends_the_answer() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: PARTS)}) as rig,
            rig.client() as client,
        ):
            one = await ask(client, START, parallel_tool_calls=False)
            assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]
            none = await ask(client, START, tool_choice="none")
            assert none.tool_choice == "none"
        async with open_rig({"s0": ScriptedEngine(call_of_forced)}) as rig, rig.client() as client:
            choice = {"type": "function", "name": "spawn", "namespace": "agents"}
            forced = await ask(client, START, tool_choice=choice)
            (item,) = forced.output
            assert item.type == "function_call"
            assert (item.name, item.namespace) == ("spawn", "agents")

    asyncio.run(main())


def test_refusals_have_openais_shape() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "x")}) as rig,
            rig.client() as client,
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="m", input="hi", background=True)
            assert refused.value.param == "background"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="m", input="word " * 9000)
            assert refused.value.code == "context_length_exceeded"
            async with rig.client(key="wrong") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.responses.create(model="m", input="hi")

    asyncio.run(main())
