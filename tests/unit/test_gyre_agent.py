"""The bundled agent's pure parts, and its bash calls on a real bash."""

import argparse
import io
import json
import time
from pathlib import Path

import pytest

from opengyre.harness import gyre_agent

LIMITS = argparse.Namespace(call_timeout_s=5.0, max_output_bytes=100)


def run(command: str, *, timeout_s: float = 5.0, max_output_bytes: int = 100) -> str:
    return gyre_agent.run_bash(command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)


def call(arguments: str, name: str = "bash") -> dict[str, object]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def event(**delta: object) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def test_output_and_errors_come_back_without_the_last_newline():
    assert run("echo one; echo two >&2") == "one\ntwo"
    assert run("true") == ""


def test_a_silent_failure_shows_its_exit_status():
    assert run("exit 3") == "exit 3"


def test_a_command_gets_no_input_to_wait_for():
    assert run("read -r line; echo read $?") == "read 1"


def test_long_output_is_cut_and_says_so():
    output = run("head -c 100000 /dev/zero | tr '\\0' x")
    assert output == "x" * 100 + "\n(output cut)"


def test_a_command_that_outlasts_its_limit_is_stopped():
    started_s = time.monotonic()
    assert run("echo early; exec sleep 60", timeout_s=0.2) == "early\n(stopped after 0.2 s)"
    assert time.monotonic() - started_s < 2


def test_a_flood_of_output_ends_at_the_time_limit():
    assert run("exec yes", timeout_s=0.2).endswith("(stopped after 0.2 s)")


def test_a_background_process_that_holds_the_pipe_delays_nothing():
    started_s = time.monotonic()
    assert run("sleep 2 & echo started") == "started"
    assert time.monotonic() - started_s < 1


def test_a_background_job_outlives_its_call_and_ends_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run("(sleep 0.1; echo late > late) > /dev/null 2>&1 &")
    deadline_s = time.monotonic() + 5
    while not Path("late").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert Path("late").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{",
        "[]",
        '"echo"',
        "{}",
        '{"command": 7}',
        '{"command": "a\\u0000b"}',
        '{"command": "\\ud800"}',
        None,
    ],
)
def test_a_malformed_call_is_answered_with_what_was_expected(arguments):
    assert gyre_agent.run_call(call(arguments), LIMITS) == gyre_agent.MALFORMED_CALL


def test_a_call_of_another_tool_is_answered_with_what_was_expected():
    other = call('{"command": "echo hi"}', name="python")
    assert gyre_agent.run_call(other, LIMITS) == gyre_agent.MALFORMED_CALL


def test_a_command_too_long_for_the_system_is_answered_with_the_reason():
    arguments = json.dumps({"command": "x" * 4_000_000})
    assert gyre_agent.run_call(call(arguments), LIMITS).startswith("error: bash cannot be started")


def test_a_good_call_runs_its_command():
    assert gyre_agent.run_call(call('{"command": "echo hi"}'), LIMITS) == "hi"


def test_streamed_pieces_join_into_the_unstreamed_answer():
    first = {"index": 0, "id": "call_1", "function": {"name": "bash", "arguments": '{"com'}}
    second = {"index": 0, "function": {"arguments": 'mand": "ls"}'}}
    end = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": {"total_tokens": 9}}
    stream = (
        ": held\n\n"
        + event(role="assistant", content="loo")
        + event(content="k")
        + event(tool_calls=[first])
        + ": held\n\n"
        + event(tool_calls=[second])
        + f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n"
    )
    joined = gyre_agent.join_stream(io.BytesIO(stream.encode()))
    message, finish_reason = gyre_agent.first_choice(joined)
    assert message["content"] == "look"
    assert message["tool_calls"] == [call('{"command": "ls"}')]
    assert (finish_reason, joined["usage"]) == ("tool_calls", {"total_tokens": 9})


def test_a_stream_that_is_cut_is_no_answer():
    with pytest.raises(gyre_agent.RetryableError, match="before"):
        gyre_agent.join_stream(io.BytesIO(event(content="half").encode()))


def test_an_endpoint_without_a_host_is_refused():
    with pytest.raises(gyre_agent.AgentError, match="OPENAI_BASE_URL"):
        gyre_agent.Endpoint("localhost:80", api_key="", timeout_s=1, max_retries=0)


@pytest.mark.parametrize("completion", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [3]}])
def test_a_completion_without_a_message_is_an_error(completion):
    with pytest.raises(gyre_agent.AgentError, match="without a message"):
        gyre_agent.first_choice(completion)


def test_only_passing_refusals_are_retried_and_their_wait_is_read():
    busy = gyre_agent.refusal(503, "2", b"busy")
    assert isinstance(busy, gyre_agent.RetryableError)
    assert busy.wait_s == 2.0
    assert not isinstance(gyre_agent.refusal(400, None, b"no"), gyre_agent.RetryableError)
