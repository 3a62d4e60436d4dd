"""The real programs against the tiny model of the quickstart: protocol and records hold.

The model has never seen such prompts and writes nonsense; only what is recorded is checked. The
profiles are shortened as a user would do it, so that the model can read them in seconds.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from drawn_pairs import PROGRAMS
from program_rig import Outcome, outcome_of, profile_of, scratch_folder
from struck_engine import Log, Served
from wire_proxy import WireProxy

from opengyre.config.harness_profile import HarnessProfile, HomeFile
from opengyre.harness.programs import find_program
from opengyre.runtime.trying.engine import embedded_try_engine
from opengyre.runtime.trying.example_task import write_example_task
from opengyre.runtime.trying.execution import StageSettings, open_stage, play
from opengyre.seams.engine import Chunk, Engine, EngineCaps, GenerateRequest
from opengyre.seams.harness import Limits
from opengyre.tasks.harbor import load_task

pytestmark = pytest.mark.timeout(180)

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
CONTEXT_TOKENS = 12_288
WALL_S = 40.0


class Witness:
    """The engine behind it, with a log of what it was asked and gave."""

    def __init__(self, inner: Engine, log: Log) -> None:
        self._inner = inner
        self._log = log

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        served = Served(request)
        self._log.served.append(served)
        async for chunk in self._inner.submit(request):
            served.ids += chunk.ids
            served.logprobs += chunk.logprobs
            yield chunk

    async def cancel(self, request_id: str) -> None:
        await self._inner.cancel(request_id)

    def caps(self) -> EngineCaps:
        return self._inner.caps()


def model_with_room(folder: Path) -> Path:
    """The quickstart's model, allowed to read further than it was trained for."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shortened(profile: HarnessProfile) -> HarnessProfile:
    """Fewer tools and shorter instructions."""
    launch = profile.launch
    system = HomeFile(path="system.md", text="You are Qwen Code, you act by your tools.")
    match profile.name:
        case "claude-code":
            argv = tuple(part.replace(" -p ", " -p --bare ") for part in launch.argv)
            launch = launch.model_copy(update={"argv": argv})
        case "codex":
            (file,) = launch.files
            text = (
                f'model_instructions_file = "{{home}}/system.md"\n{file.text}\n'
                "[features]\nmulti_agent = false\ngoals = false\n"
            )
            files = (HomeFile(path=file.path, text=text), system)
            launch = launch.model_copy(update={"files": files})
        case "qwen-code":
            settings = {"tools": {"core": ["run_shell_command"]}}
            files = (
                *(file for file in launch.files if not file.path.endswith("settings.json")),
                HomeFile(path=".qwen/settings.json", text=json.dumps(settings)),
                system,
            )
            env = {**launch.env, "QWEN_SYSTEM_MD": "{home}/system.md"}
            launch = launch.model_copy(update={"files": files, "env": env})
    return profile.model_copy(update={"launch": launch})


async def played(profile: HarnessProfile, folder: Path) -> Outcome:
    task = load_task(write_example_task(folder / "task"))
    log = Log()
    async with embedded_try_engine(str(model_with_room(folder / "model"))) as chosen:
        settings = StageSettings(
            profile=profile,
            program=find_program(profile),
            model=chosen.model,
            context_tokens=chosen.context_tokens,
            limits=Limits(wall_s=WALL_S),
        )
        async with open_stage(settings, {"s0": Witness(chosen.engine, log)}) as stage:
            proxy = WireProxy(stage.gateway.address)
            async with proxy.listening() as address:
                result = await play(stage, task, address=address)
            return outcome_of(stage, result, log=log, proxy=proxy)


@pytest.mark.parametrize("name", PROGRAMS)
def test_case_1_ids_and_logprobs_of_a_model_are_recorded_exactly(name: str) -> None:
    with scratch_folder() as folder:
        run = asyncio.run(played(shortened(profile_of(name)), folder))
    assert run.committed, run.played.result.output_tail[-2000:]
    run.check_recorded_exactly()
    assert run.account.trained > 0
