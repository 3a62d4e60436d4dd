"""A process with a torch engine behind a link, to be killed. Prints its address, then serves."""

import asyncio
import sys

import torch
from handoff_rig import KINDS, engine_of

from opengyre.transport.engine_server import EngineServer


async def main(kind_name: str, address: str, name: str) -> None:
    async with (
        engine_of(KINDS[kind_name], name=name) as engine,
        EngineServer(engine, address) as server,
    ):
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
