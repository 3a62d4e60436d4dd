"""gyre-agent as the separate program it is, against a real HTTP endpoint."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opengyre.harness import gyre_agent


class ScriptedServer(ThreadingHTTPServer):
    """Answers each POST with the next of `answers`: (status, headers, body bytes)."""

    daemon_threads = True

    def __init__(self, answers: list[tuple[int, dict[str, str], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.answers = answers
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.num_connections = 0


class ScriptedHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        size_bytes = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(size_bytes)))
        self.server.paths.append(f"{self.path} {self.headers['Authorization']}")
        status, headers, body = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving(answers: list[tuple[int, dict[str, str], bytes]]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tool_call(command: str, call_id: str = "call_1") -> dict:
    arguments = json.dumps({"command": command})
    function = {"name": "bash", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def answer(content: str | None, *calls: dict, reason: str = "stop", num_tokens: int = 10):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    choice = {"index": 0, "message": message, "finish_reason": reason}
    body = {"choices": [choice], "usage": {"total_tokens": num_tokens}}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def run_agent(server: ScriptedServer, folder: Path, *options: str):
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    (folder / "instruction.md").write_text("Write the file.\n")
    port = server.server_address[1]
    program = [sys.executable, "-I", "-S", gyre_agent.__file__]
    return subprocess.run(
        [*program, "--instruction-file", str(folder / "instruction.md"), *options],
        cwd=workspace,
        env={
            "PATH": "/usr/bin:/bin",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/e000001/v1",
            "OPENAI_API_KEY": "key-1",
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_calls_run_in_the_workspace_over_one_connection_and_go_back_as_they_came(tmp_path):
    call = tool_call("echo 5 > out; cat out")
    with serving([answer(None, call, reason="tool_calls"), answer("done")]) as server:
        ended = run_agent(server, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert (tmp_path / "workspace" / "out").read_text() == "5\n"
    assert server.num_connections == 1
    assert server.paths == ["/e000001/v1/chat/completions Bearer key-1"] * 2
    assert server.requests[0] == {
        "model": "policy",
        "messages": [{"role": "user", "content": "Write the file."}],
        "tools": gyre_agent.TOOLS,
        "max_completion_tokens": 24,
    }
    assert server.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]


def test_a_streamed_answer_does_the_same_work(tmp_path):
    delta = {"role": "assistant", "tool_calls": [{"index": 0, **tool_call("echo 5 > out")}]}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": "tool_calls"}]}
    first = f": held\n\ndata: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    last = {"choices": [{"index": 0, "delta": {"content": "done"}, "finish_reason": "stop"}]}
    second = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    headers = {"Content-Type": "text/event-stream"}
    with serving([(200, headers, first), (200, headers, second)]) as server:
        ended = run_agent(server, tmp_path, "--stream")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.num_connections == 1
    assert all(request["stream"] for request in server.requests)
    assert (tmp_path / "workspace" / "out").read_text() == "5\n"


def test_busy_answers_are_retried_as_asked_with_the_same_request(tmp_path):
    busy = [(503, {"Retry-After": "0"}, b"no engine"), (429, {"Retry-After": "0.01"}, b"slow")]
    with serving([*busy, answer("done")]) as server:
        ended = run_agent(server, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.requests[0] == server.requests[1] == server.requests[2]


def test_an_endpoint_that_stays_busy_ends_the_agent_with_one_line(tmp_path):
    with serving([(503, {"Retry-After": "0"}, b"no\nengine")] * 3) as server:
        ended = run_agent(server, tmp_path, "--max-retries", "2")
    assert ended.returncode == 1
    assert ended.stderr == "gyre-agent: endpoint answered 503: no engine (after 3 attempts)\n"


def test_a_refused_request_is_not_asked_again(tmp_path):
    with serving([(400, {}, b"bad")]) as server:
        ended = run_agent(server, tmp_path)
    assert (ended.returncode, len(server.requests)) == (1, 1)
    assert ended.stderr == "gyre-agent: endpoint answered 400: bad\n"


def test_an_answer_cut_by_its_length_ends_the_conversation(tmp_path):
    with serving([answer("<tool_call>\n{", reason="length")]) as server:
        ended = run_agent(server, tmp_path)
    assert (ended.returncode, len(server.requests)) == (0, 1)


def test_turn_and_context_limits_end_the_conversation(tmp_path):
    call = tool_call("true")
    with serving([answer(None, call)] * 3) as server:
        turns = run_agent(server, tmp_path, "--max-turns", "3")
    with serving([answer(None, call, num_tokens=100)]) as server:
        context = run_agent(server, tmp_path, "--context-tokens", "100")
    assert (turns.returncode, turns.stdout) == (0, "(turn limit)\n")
    assert (context.returncode, context.stdout) == (0, "(context limit)\n")


def test_a_missing_instruction_is_the_users_error(tmp_path):
    ended = subprocess.run(
        [sys.executable, gyre_agent.__file__, "--instruction-file", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
