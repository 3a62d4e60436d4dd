"""A gateway in a process of its own that writes real segment files, to be killed by a test.

`python cases_gateway_process.py FOLDER PORT TOKENS_PER_S`: restores what FOLDER holds, opens
EXECUTIONS, each with key-1, and prints its port. Imports little: it is started often.
"""

import asyncio
import sys
from pathlib import Path

from tokenizers import Tokenizer

from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine, text_policy
from opengyre.gateway.gateway import Gateway, GatewayEvents, GatewaySettings
from opengyre.gateway.rendering.renderer import load_renderer
from opengyre.gateway.restoring import Earlier
from opengyre.seams.records import TokenRecord
from opengyre.store.segments import SegmentReader, SegmentWriter, segment_numbers

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
EXECUTIONS = ("e000001", "e000002", "e000003")
CALLS = [
    '{"command": "ls", "timeout": 5000.0}',
    '{"timeout": 1.50, "command": "\\u00e9"}',
]
ANSWERS = [
    f"<think>\nI think {k}.\n\n</think>\n\nWords {k}.\n\n"
    f'<tool_call>\n{{"name": "bash", "arguments": {CALLS[k % 2]}}}\n</tool_call>'
    for k in range(8)
]


class PlainTokenizer:
    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def answer(text: str, seed: int) -> str:
    """The k-th one to a prompt that holds k - 1."""
    return ANSWERS[min(text.count("<|im_start|>assistant\n") - 1, len(ANSWERS) - 1)]


def recorded(folder: Path, execution: str) -> list[TokenRecord]:
    """What is on disk of an execution, in the order it was written."""
    reader = SegmentReader(folder)
    found = [record for number in segment_numbers(folder) for record in reader.scan(number)]
    return [record for record in found if record.header.execution == execution]


async def main(folder: Path, port: int, tokens_per_s: float) -> None:
    records = {execution: recorded(folder, execution) for execution in EXECUTIONS}
    events = GatewayEvents(
        on_turn=lambda turn: None,
        on_hold=lambda execution, started: None,
        on_continued=lambda move: None,
    )
    settings = ScriptedConfig(tokens_per_s=tokens_per_s)
    engine = ScriptedEngine(text_policy(PlainTokenizer(), answer), settings)
    async with Gateway(
        GatewaySettings(max_context_tokens=settings.context_tokens, port=port),
        renderer=load_renderer(MODEL),
        recorder=SegmentWriter(folder),
        events=events,
    ) as gateway:
        gateway.connect_engine("s0", engine, 0)
        for execution, mine in records.items():
            gateway.open_session(execution, "key-1", "s0", seed=7, earlier=Earlier(records=mine))
        sys.stdout.write(f"{gateway.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
