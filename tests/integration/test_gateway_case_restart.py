"""Case 17: kill -9 and restart of a gateway: committed turns are there, sessions go on."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cases_gateway_process import ANSWERS, EXECUTIONS, recorded
from cases_rig import Harness, new_client, text_of
from cases_speakers import SPEAKERS

from opengyre.seams.records import TokenRecord
from opengyre.store.trees import tree_of
from opengyre.trajectory.selection import SelectionSettings, select
from opengyre.trajectory.tree import line_ids

HERE = Path(__file__).parent
PROGRAM = HERE / "cases_gateway_process.py"
START_TIMEOUT_S = 60.0


@dataclass
class Address:
    """Stands for a rig: what a harness needs of it is where the gateway is."""

    host: str = "127.0.0.1"
    port: int = 0
    gateway: "Address" = field(init=False)

    def __post_init__(self) -> None:
        self.gateway = self

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def gateway_process(
    folder: Path, address: Address, *, tokens_per_s: float = 0.0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed at the end, if it was not before; at the port of the first one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), str(folder), str(address.port), str(tokens_per_s)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        address.port = int(line)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def full_prompt(records: list[TokenRecord], record: TokenRecord) -> list[int]:
    header = record.header
    kept: list[int] = []
    if header.parent:
        parent = next(one for one in records if one.header.turn == header.parent)
        kept = (full_prompt(records, parent) + parent.completion_ids)[: header.num_kept_tokens]
    return kept + record.new_prompt_ids


def check_one_branch(folder: Path, execution: str, num_turns: int) -> None:
    """Committed turns are one branch with the script's answers, and all of it is trained."""
    records = recorded(folder, execution)
    committed = [record for record in records if record.header.is_committed]
    assert [record.header.turn for record in committed] == [
        f"{execution}.t{k + 1}" for k in range(num_turns)
    ]
    before: list[int] = []
    for record, answer in zip(committed, ANSWERS, strict=False):
        prompt = full_prompt(committed, record)
        assert prompt[: len(before)] == before
        assert record.header.fork_reason == ""
        assert text_of(record.completion_ids) == f"{answer}<|im_end|>"
        before = prompt + record.completion_ids
    settings = SelectionSettings(max_paths=0)
    selection = select(tree_of(records), settings=settings, rng=np.random.default_rng(0))
    (path,) = selection.paths
    assert line_ids(path.leaf).tolist() == before
    assert selection.account.trained == sum(len(record.completion_ids) for record in committed) > 0


async def turn(one: Harness, *, stream: bool) -> None:
    reply = await one.ask(stream=stream)
    one.keep(reply, one.speaker.as_harness(reply.sent_back), *("r" for _ in reply.calls))


def harnesses(address: Any, client: httpx.AsyncClient) -> list[Harness]:
    """One for each protocol, each in an execution of its own."""
    return [
        Harness(rig=address, speaker=speaker, client=client, execution=execution)
        for speaker, execution in zip(SPEAKERS, EXECUTIONS, strict=True)
    ]


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def live_two_turns(
    folder: Path, address: Address, harnesses: list[Harness], *, stream: bool
) -> None:
    """One life of a gateway."""
    async with gateway_process(folder, address) as process:
        for _ in range(2):
            await asyncio.gather(*(turn(one, stream=stream) for one in harnesses))
        await kill(process)


def test_case_17_a_killed_gateway_comes_back_with_every_answer_it_gave(tmp_path: Path) -> None:
    """Killed right after an answer, before anything was synced."""

    async def main() -> None:
        address: Any = Address()
        async with new_client() as client:
            all_three = harnesses(address, client)
            for k in range(3):
                await live_two_turns(tmp_path, address, all_three, stream=k != 1)
            for one in all_three:
                assert one.num_requests == 6
                check_one_branch(tmp_path, one.execution, 6)

    asyncio.run(main())


def test_case_17_streams_of_a_killed_gateway_are_reset_and_their_retries_are_the_same_turns(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        address: Any = Address()
        async with new_client() as client:
            all_three = harnesses(address, client)
            async with gateway_process(tmp_path, address, tokens_per_s=100) as process:
                await asyncio.gather(*(turn(one, stream=True) for one in all_three))
                reads = [asyncio.create_task(read_to_the_end(one)) for one in all_three]
                await asyncio.sleep(0.3)
                await kill(process)
                ends = await asyncio.gather(*reads, return_exceptions=True)
                assert [type(end) for end in ends] == [httpx.ReadError] * 3, "a clean end"
            async with gateway_process(tmp_path, address):
                for _ in range(2):
                    await asyncio.gather(*(turn(one, stream=True) for one in all_three))
            for one in all_three:
                check_one_branch(tmp_path, one.execution, 3)

    asyncio.run(main())


async def read_to_the_end(one: Harness) -> None:
    """Raises ReadError after a reset; another error, or none, after a clean end."""
    body = one.body(stream=True)
    num_bytes = 0
    async with one.client.stream("POST", one.url, headers=one.headers, json=body) as answer:
        try:
            async for part in answer.aiter_raw():
                num_bytes += len(part)
        finally:
            assert num_bytes, "it was killed too early"
