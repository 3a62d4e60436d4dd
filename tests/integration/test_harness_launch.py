"""The bundled agent and any command, launched confined against a model that answers by script."""

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from opengyre.config.harness_profile import load_profile
from opengyre.harness.profiles import Staged, open_harness, stage_agent
from opengyre.harness.selftest import open_sandbox
from opengyre.seams.harness import Ending, Harness, HarnessJob, LaunchResult, Limits

SETTINGS = {"max_turns": "8", "max_new_tokens": "200", "context_tokens": "0"}
CALL = {"command": "echo $((40 + 2)) > out; cat out; ls /root; touch /etc/planted"}


class ScriptedModel(BaseHTTPRequestHandler):
    """One bash call, then a last word. Keeps what it was sent."""

    protocol_version = "HTTP/1.1"
    requests: list[tuple[str, dict]]

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        self.server.requests.append((self.headers["Authorization"], body))
        message = {"role": "assistant", "content": "done"}
        if not any(one["role"] == "tool" for one in body["messages"]):
            function = {"name": "bash", "arguments": json.dumps(CALL)}
            call = {"id": "call_1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        answer = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def model() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ScriptedModel) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def work_root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gyre-harness-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def job_in(root: Path, port: int) -> HarnessJob:
    for name in ("workspace", "tmp"):
        (root / name).mkdir()
    return HarnessJob(
        execution="e000001",
        instruction="Write 42 to out.",
        workspace=root / "workspace",
        private_tmp=root / "tmp",
        base_url=f"http://127.0.0.1:{port}/e000001/v1",
        api_key="sk-e000001",
        model="policy",
        limits=Limits(wall_s=20.0),
    )


def test_the_bundled_agent_works_inside_its_workspace_and_nowhere_else(
    work_root: Path, model: ThreadingHTTPServer
) -> None:
    program = stage_agent(work_root / "agent")

    async def launched() -> LaunchResult:
        async with open_sandbox(work_root, read_only_paths=[program]) as here:
            report = here.report
            staged = Staged(
                python=report.python, python_paths=report.python_paths, gyre_agent=program
            )
            agent: Harness = open_harness(
                load_profile("gyre-agent"), None, staged=staged, settings=SETTINGS
            )
            spec = agent.prepare(job_in(work_root, model.server_port))
            return await here.sandbox.run(spec)

    result = asyncio.run(launched())
    assert (result.ending, result.exit_code) == (Ending.EXITED, 0), result.output_tail
    assert (work_root / "workspace" / "out").read_text() == "42\n"
    assert not Path("/etc/planted").exists()
    assert [key for key, _ in model.requests] == ["Bearer sk-e000001"] * 2
    told = json.dumps(model.requests[1][1])
    assert "42" in told
    assert "ermission denied" in told


def test_a_command_gets_its_endpoint_and_instruction(
    work_root: Path, model: ThreadingHTTPServer
) -> None:
    script = "cat {instruction_file}; echo; echo $OPENAI_BASE_URL $OPENAI_MODEL {model}; pwd"

    async def launched() -> LaunchResult:
        async with open_sandbox(work_root) as here:
            nothing = Path("/nonexistent")
            staged = Staged(python=nothing, python_paths=(nothing,), gyre_agent=nothing)
            command = open_harness(
                load_profile("command"),
                None,
                staged=staged,
                settings=SETTINGS,
                command=("/bin/sh", "-c", script),
            )
            return await here.sandbox.run(command.prepare(job_in(work_root, model.server_port)))

    result = asyncio.run(launched())
    url = f"http://127.0.0.1:{model.server_port}/e000001/v1"
    assert result.output_tail.splitlines() == [
        "Write 42 to out.",
        f"{url} policy policy",
        str(work_root / "workspace"),
    ]
