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
        self.roles: list[str] = []
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
        self.server.roles.append(self.headers["X-Gyre-Call"])
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


def run_agent(
    server: ScriptedServer, folder: Path, *options: str, instruction: str = "Write the file.\n"
):
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    (folder / "instruction.md").write_text(instruction)
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


def calls_and_outputs(*commands: str) -> list[dict]:
    """What `echo` commands leave in a conversation."""
    return [
        message
        for command in commands
        for message in (
            {"role": "assistant", "content": None, "tool_calls": [tool_call(command)]},
            {"role": "tool", "tool_call_id": "call_1", "content": command.removeprefix("echo ")},
        )
    ]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_long_conversation_goes_on_in_a_new_one_with_a_summary_and_the_last_calls(tmp_path):
    answers = [answer(None, tool_call(f"echo {n}"), num_tokens=20 * n) for n in range(1, 6)]
    answers += [answer("Five were said."), answer(None, tool_call("echo 6")), answer("done")]
    with serving(answers) as server:
        ended = run_agent(server, tmp_path, "--compact-at-tokens", "100")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert server.roles == ["main"] * 5 + ["main-summary"] + ["main"] * 2
    said = [request["messages"] for request in server.requests]
    before = [user("Write the file."), *calls_and_outputs(*(f"echo {n}" for n in range(1, 6)))]
    assert said[5] == [*before, user(gyre_agent.SUMMARY_REQUEST)]
    opening = user("Write the file.\n\nFive were said.")
    assert said[6] == [opening, *calls_and_outputs("echo 4", "echo 5")]
    assert said[7] == [opening, *calls_and_outputs("echo 4", "echo 5", "echo 6")]
    assert {json.dumps(request["tools"]) for request in server.requests} == {
        json.dumps(gyre_agent.TOOLS)
    }


def test_a_conversation_that_cannot_be_shortened_goes_on_as_it_is(tmp_path):
    text = "Write the file. " * 40
    answers = [answer(None, tool_call("echo 1"), num_tokens=100), answer("done")]
    with serving(answers) as server:
        ended = run_agent(server, tmp_path, "--compact-at-tokens", "100", instruction=text)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.requests[1]["messages"] == [user(text.strip()), *calls_and_outputs("echo 1")]


def test_an_output_larger_than_all_else_is_left_to_the_summary(tmp_path):
    call = tool_call("head -c 3000 /dev/zero | tr '\\0' x")
    with serving([answer(None, call, num_tokens=100), answer(None), answer("done")]) as server:
        ended = run_agent(server, tmp_path, "--compact-at-tokens", "100")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.requests[2]["messages"] == [user("Write the file.\n\n-")]


def test_a_sub_agent_begins_and_hands_over_what_it_did(tmp_path):
    answers = [answer(None, tool_call(f"echo {n}")) for n in range(1, 5)]
    answers += [answer("Four were said."), answer("done")]
    with serving(answers) as server:
        ended = run_agent(server, tmp_path, "--scout-turns", "4")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.roles == ["sub-agent"] * 4 + ["sub-agent-summary", "main"]
    said = [request["messages"] for request in server.requests]
    begun = [user("Write the file."), *calls_and_outputs(*(f"echo {n}" for n in range(1, 5)))]
    assert said[4] == [*begun, user(gyre_agent.SUMMARY_REQUEST)]
    assert said[5] == [
        user("Write the file.\n\nFour were said."),
        *calls_and_outputs(*(f"echo {n}" for n in range(1, 5))),
    ]


def test_a_sub_agent_leaves_half_of_the_context_to_the_other(tmp_path):
    answers = [answer(None, tool_call("echo 1"), num_tokens=50), answer(None)]
    answers += [answer(None, tool_call("echo 2"), num_tokens=100)]
    with serving(answers) as server:
        ended = run_agent(server, tmp_path, "--scout-turns", "4", "--context-tokens", "100")
    assert (ended.returncode, ended.stdout) == (0, "(context limit)\n")
    assert server.roles == ["sub-agent", "sub-agent-summary", "main"]


def test_a_sub_agent_that_answers_is_not_asked_for_a_summary(tmp_path):
    with serving([answer("I saw nothing."), answer("done")]) as server:
        ended = run_agent(server, tmp_path, "--scout-turns", "4")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert server.roles == ["sub-agent", "main"]
    assert server.requests[1]["messages"] == [user("Write the file.\n\nI saw nothing.")]


def test_every_call_of_every_conversation_counts_for_the_turn_limit(tmp_path):
    options = ("--scout-turns", "3", "--compact-at-tokens", "30", "--max-turns")
    answers = [answer(None, tool_call("echo 1"), num_tokens=40) for _ in range(9)]
    for num_turns in range(1, 9):
        with serving(answers[:]) as server:
            ended = run_agent(server, tmp_path, *options, str(num_turns))
        assert (ended.returncode, ended.stdout) == (0, "(turn limit)\n")
        assert len(server.requests) == num_turns
    assert server.roles[:2] == ["sub-agent", "sub-agent-summary"]


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
