"""What a gateway counts of an answer's calls stands in its record."""

import asyncio

from gateway_rig import TOOLS, open_rig, scripted

from opengyre.config.watched import WATCHED_PATTERN
from opengyre.gateway.call_counts import watched_regex

ASKED = [{"role": "user", "content": "go"}]


def call(command: str, *, end: str = "\n</tool_call>") -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}{end}'


ANSWERS = [
    (call("ls") + "\n" + call("rm tests/test_a.py"), 400, (2, 0, 1)),
    ("<tool_call>\nls\n</tool_call>", 400, (0, 1, 0)),
    (call("ls", end="")[:-2], 400, (0, 1, 0)),
    (call("ls " + "word " * 40), 30, (0, 0, 0)),
    ("just words", 400, (0, 0, 0)),
]


def test_each_record_counts_the_calls_of_its_answer() -> None:
    async def main() -> None:
        answers = iter([text for text, _, _ in ANSWERS])
        engine = scripted(lambda text, seed: next(answers))
        watched = watched_regex(WATCHED_PATTERN)
        async with open_rig({"s0": engine}, watched=watched) as rig, rig.client() as client:
            for _, num_tokens, _ in ANSWERS:
                await client.chat.completions.create(
                    model="m", messages=ASKED, tools=TOOLS, max_completion_tokens=num_tokens
                )
            await rig.gateway.close_session("e000001")
            found = [
                (turn.num_calls, turn.num_malformed_calls, turn.num_watched_calls)
                for turn in rig.told
            ]
            assert found == [counts for _, _, counts in ANSWERS]
            assert [turn.finish for turn in rig.told] == ["stop"] * 3 + ["length", "stop"]

    asyncio.run(main())
