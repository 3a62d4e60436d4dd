"""A link that broke is made again in short tries, each with a deadline."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from opengyre.runtime import gateway_process
from opengyre.runtime import messages as m
from opengyre.runtime.gateway_process import GatewayProcess
from opengyre.transport.engine_link import RemoteEngine


def test_an_engine_that_listens_and_never_answers_ends_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_process, "CONNECT_TIMEOUT_S", 0.1)
    address = f"unix:{tmp_path / 'c1.sock'}"
    nobody: Any = None

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(read, tmp_path / "c1.sock")
        async with server, asyncio.TaskGroup() as tasks:
            process = GatewayProcess(nobody, nobody, tasks)
            message = m.ConnectEngine(engine="c1", incarnation=1, link_address=address)
            old = RemoteEngine(address, name="c1")
            async with asyncio.timeout(5.0):
                assert await process._reconnect(old, message) is None

    asyncio.run(main())
    assert "c1: no new connection: no answer in 0.1 s" in caplog.text
