"""Launching small scripts in a real sandbox, and looking for what they left behind."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from opengyre.harness.sandbox import LocalSandbox
from opengyre.harness.selftest import open_sandbox
from opengyre.seams.harness import LaunchResult, LaunchSpec, Limits

POLLS = 1000
POLL_S = 0.01


def spec_of(root: Path, script: str, *, name: str = "e000001", **limits: float) -> LaunchSpec:
    workspace, private_tmp = root / name / "workspace", root / name / "tmp"
    for folder in (workspace, private_tmp):
        folder.mkdir(parents=True, exist_ok=True)
    bounds = {"wall_s": 20.0, "grace_s": 0.1, **limits}
    return LaunchSpec(
        execution=name,
        argv=("/bin/bash", "-c", script),
        workspace=workspace,
        private_tmp=private_tmp,
        limits=Limits(**bounds),
    )


def in_sandbox(root: Path, use: Callable[[LocalSandbox], Awaitable[LaunchResult]]) -> LaunchResult:
    async def opened() -> LaunchResult:
        async with open_sandbox(root) as here:
            return await use(here.sandbox)

    return asyncio.run(opened())


def run_script(root: Path, script: str, **limits: float) -> LaunchResult:
    return in_sandbox(root, lambda sandbox: sandbox.run(spec_of(root, script, **limits)))


def processes_with(word: str) -> list[int]:
    """Other processes whose command line holds `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [pid for pid in found if pid != os.getpid()]


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(POLLS):
        if is_true():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError("it did not become true")
