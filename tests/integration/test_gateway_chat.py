"""Chat completions through the official SDK over real HTTP, against a scripted engine."""

import asyncio

from gateway_rig import TOOLS, open_rig, scripted

HELLO = [{"role": "user", "content": "say hello"}]


def test_an_unstreamed_call_returns_the_text_and_the_exact_record() -> None:
    async def main() -> None:
        async with open_rig({"s0": scripted(lambda text, seed: "hello there")}) as rig:
            async with rig.client() as client:
                answer = await client.chat.completions.create(model="m", messages=HELLO)
            counts = await rig.gateway.close_session("e000001")
            assert answer.choices[0].message.content == "hello there"
            assert answer.choices[0].finish_reason == "stop"
            (turn,) = rig.told
            assert counts.num_turns == 1
            assert (turn.turn, turn.parent, turn.fork_reason) == ("e000001.t1", "", "")
            assert turn.is_committed
            assert turn.finish == "stop"
            (record,) = rig.recorder.records
            assert len(record.logprobs) == len(record.completion_ids) == turn.spans[-1].end
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(record.completion_ids)
            assert answer.usage.prompt_tokens == len(record.new_prompt_ids)

    asyncio.run(main())


def test_a_streamed_call_comes_in_increments_with_usage() -> None:
    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: "one two three four")}) as rig,
            rig.client() as client,
        ):
            stream = await client.chat.completions.create(
                model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.choices[0].delta.content for c in chunks if c.choices]
            assert "".join(text or "" for text in texts) == "one two three four"
            assert sum(bool(text) for text in texts) > 3
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].usage is not None
            assert chunks[-1].choices == []

    asyncio.run(main())


def test_a_tool_call_has_the_arguments_exactly_as_sampled() -> None:
    arguments = '{"command":  "echo \\u00e9", "n": 5000.0}'
    call = f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'

    async def main() -> None:
        async with (
            open_rig({"s0": scripted(lambda text, seed: call)}) as rig,
            rig.client() as client,
        ):
            answer = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.content is None
            (told,) = answer.choices[0].message.tool_calls or []
            assert told.function.name == "bash"
            assert told.function.arguments == arguments

    asyncio.run(main())
