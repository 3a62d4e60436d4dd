"""gyre-agent: a bash-using agent in one file, standard library only (it starts in about 40 ms).

Owns the loop "ask the model, run its bash calls in the current folder, send the output back"
until the model answers without a call. On request it begins a new conversation, with a summary
and the last calls, before the old one grows too long, or lets a sub-agent begin the work. It knows
an OpenAI-compatible endpoint and nothing else of the system it runs under; it must not import
other modules of this package.

Invariants: one keep-alive connection; assistant messages go back exactly as they came, so that an
endpoint can match them; each call says in a header whose it is; every wait, retry, output and
turn count is bounded.

Exit codes: 0 the conversation ended (answer, turn limit, context limit), 1 the endpoint failed,
2 the user's input was wrong. A failure is one line on stderr.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
CALL_HEADER = "X-Gyre-Call"
MAIN, SUB_AGENT = "main", "sub-agent"
SUMMARY = "-summary"
SUMMARY_REQUEST = "Summarize."
NO_SUMMARY = "-"
MALFORMED_CALL = 'error: call bash with {"command": "..."}'
RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_RETRY_WAIT_S = 30.0
EXIT_POLL_S = 0.02


class AgentError(Exception):
    """The endpoint cannot be used; the text is one line for the user."""


class RetryableError(AgentError):
    """The same request may succeed later; `wait_s` is what the endpoint asked for, or None."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class Endpoint:
    """One keep-alive connection to `{base_url}/chat/completions`."""

    def __init__(self, base_url: str, *, api_key: str, timeout_s: float, max_retries: int) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise AgentError(f"OPENAI_BASE_URL must be an http(s) URL, not {base_url!r}")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname, url.port, timeout=timeout_s)
        self._path = url.path.rstrip("/") + "/chat/completions"
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
            "User-Agent": "gyre-agent",
        }
        self._max_retries = max_retries

    def complete(self, body: Mapping[str, Any], *, role: str) -> dict[str, Any]:
        """Return the completion object for `body`, retrying at most `max_retries` times.

        `role` says in a header whose call it is.

        Raises AgentError when the endpoint refuses the request or keeps failing.
        """
        payload = json.dumps(body, separators=(",", ":")).encode()
        self._headers[CALL_HEADER] = role
        for attempt in range(self._max_retries + 1):
            try:
                return self._attempt(payload, is_stream=bool(body.get("stream")))
            except RetryableError as error:
                self._connection.close()
                if attempt == self._max_retries:
                    raise AgentError(f"{error} (after {attempt + 1} attempts)") from error
                backoff_s = 0.25 * 2**attempt
                wait_s = backoff_s if error.wait_s is None else error.wait_s
                time.sleep(min(wait_s, MAX_RETRY_WAIT_S))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        self._connection.close()

    def _attempt(self, payload: bytes, *, is_stream: bool) -> dict[str, Any]:
        try:
            self._connection.request("POST", self._path, payload, self._headers)
            response = self._connection.getresponse()
            if response.status != 200:
                raise refusal(
                    response.status, response.getheader("retry-after"), response.read(2000)
                )
            if is_stream:
                completion = join_stream(response)
                response.read()
                return completion
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise RetryableError(f"endpoint: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise RetryableError(f"endpoint sent what is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise AgentError("endpoint sent JSON that is not an object")
        return answer


def refusal(status: int, retry_after: str | None, body: bytes) -> AgentError:
    """The error for an HTTP status other than 200."""
    text = " ".join(body.decode(errors="replace").split())[:300]
    line = f"endpoint answered {status}: {text}"
    if status not in RETRY_STATUSES:
        return AgentError(line)
    try:
        wait_s = max(0.0, float(retry_after or ""))
    except ValueError:
        wait_s = None
    return RetryableError(line, wait_s)


def sse_payloads(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each event up to `[DONE]`; comments and other fields are skipped.

    Raises RetryableError when the stream ends without `[DONE]`: a cut is never an end.
    """
    for line in iter(response.readline, b""):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].decode().strip()
        if payload == "[DONE]":
            return
        yield payload
    raise RetryableError("endpoint's stream ended before [DONE]")


def join_stream(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Put the chunks of a streamed completion together into the unstreamed shape."""
    content: list[str] = []
    calls: dict[int, Message] = {}
    finish_reason, usage = None, None
    for payload in sse_payloads(response):
        chunk = json.loads(payload)
        if "error" in chunk:
            raise RetryableError(f"endpoint sent an error in its stream: {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice.get("delta") or {}
            content.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                add_call_part(calls, part)
    message: Message = {"role": "assistant", "content": "".join(content) or None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


def add_call_part(calls: dict[int, Message], part: Mapping[str, Any]) -> None:
    """Add one streamed piece of a tool call to the call of its index."""
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(part.get("index", 0), empty)
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def run_bash(command: str, *, timeout_s: float, max_output_bytes: int) -> str:
    """Run one command and return its stdout and stderr, without the last newline.

    A background process that keeps the pipe open delays nothing: reading ends with the command.
    The command stays in this process's group, so that whoever ends the agent ends it too.
    """
    with subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        try:
            output, is_over = read_while_running(
                child, deadline_s=time.monotonic() + timeout_s, max_bytes=max_output_bytes
            )
        finally:
            child.kill()
    text = output.decode(errors="replace")
    if len(output) > max_output_bytes:
        text = output[:max_output_bytes].decode(errors="replace") + "\n(output cut)"
    text = text.rstrip("\n")
    if is_over:
        return f"{text}\n(stopped after {timeout_s:g} s)".lstrip("\n")
    return text if text or not child.returncode else f"exit {child.returncode}"


def read_while_running(
    child: subprocess.Popen[bytes], *, deadline_s: float, max_bytes: int
) -> tuple[bytes, bool]:
    """Return at most `max_bytes` + 1 bytes of output, and whether the deadline came first."""
    assert child.stdout is not None
    read_fd = child.stdout.fileno()
    output = b""
    is_open = True
    while is_open or child.poll() is None:
        if time.monotonic() >= deadline_s:
            return output, True
        if not is_open:
            time.sleep(EXIT_POLL_S / 10)
            continue
        has_exited = child.poll() is not None
        ready, _, _ = select.select([read_fd], [], [], 0 if has_exited else EXIT_POLL_S)
        if ready:
            piece = os.read(read_fd, 65536)
            is_open = bool(piece)
            output = (output + piece)[: max_bytes + 1]
        elif has_exited:
            break
    child.wait()
    return output, False


def run_call(call: Message, options: argparse.Namespace) -> str:
    """The output of one tool call; a malformed call is answered with what was expected."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
        command = arguments["command"]
        is_runnable = function["name"] == "bash" and b"\0" not in command.encode()
    except (AttributeError, KeyError, TypeError, ValueError):
        return MALFORMED_CALL
    if not is_runnable:
        return MALFORMED_CALL
    try:
        return run_bash(
            command, timeout_s=options.call_timeout_s, max_output_bytes=options.max_output_bytes
        )
    except OSError as error:
        return f"error: bash cannot be started: {error.strerror}"


def first_choice(completion: Mapping[str, Any]) -> tuple[Message, str]:
    """The message and finish reason of a completion.

    Raises AgentError when there is no such thing.
    """
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise AgentError("endpoint sent a completion without a message")
    return message, str(choice.get("finish_reason"))


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def opening(instruction: str, summary: str) -> Message:
    """How a conversation begins that goes on with what another one did."""
    return user_message(f"{instruction}\n\n{summary or NO_SUMMARY}")


class Conversation:
    """What is said under one role, from an instruction on; a longer one may go on as a shorter.

    `limit_tokens` end it (0: none do); `limit` says which limit it was.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: argparse.Namespace,
        *,
        role: str,
        instruction: str,
        limit_tokens: int,
    ) -> None:
        self.messages: list[Message] = [user_message(instruction)]
        self.limit = "(turn limit)"
        self._limit_tokens = limit_tokens
        self._endpoint = endpoint
        self._options = options
        self._role = role
        self._instruction = instruction

    def run(self, turns: Iterator[int]) -> str | None:
        """Play until an answer without a call, and return its text; None: it came to a limit."""
        for _ in turns:
            message, finish_reason, num_tokens = self._ask(self.messages, role=self._role)
            calls = message.get("tool_calls") or []
            if not calls:
                return str(message.get("content") or f"({finish_reason})")
            self._take(message, calls)
            if 0 < self._options.compact_at_tokens <= num_tokens and self._compact(turns):
                continue
            if 0 < self._limit_tokens <= num_tokens:
                self.limit = "(context limit)"
                break
        return None

    def summarize(self, turns: Iterator[int]) -> str:
        """What the model says of it all, in a turn of its own; "" if none is left."""
        if next(turns, None) is None:
            return ""
        asked = [*self.messages, user_message(SUMMARY_REQUEST)]
        message, _, _ = self._ask(asked, role=self._role + SUMMARY)
        return str(message.get("content") or "")

    def _compact(self, turns: Iterator[int]) -> bool:
        """Go on in a new conversation. False: nothing would be left out of it."""
        kept = last_calls(self.messages)
        if len(kept) == len(self.messages) - 1:
            return False
        self.messages = [opening(self._instruction, self.summarize(turns)), *kept]
        return True

    def _ask(self, messages: list[Message], *, role: str) -> tuple[Message, str, int]:
        """The model's message, why it ended, and the tokens of the call in all."""
        request: dict[str, Any] = {
            "model": self._options.model,
            "messages": messages,
            "tools": TOOLS,
            "max_completion_tokens": self._options.max_output_tokens,
        }
        if self._options.stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        completion = self._endpoint.complete(request, role=role)
        num_tokens = (completion.get("usage") or {}).get("total_tokens", 0)
        return *first_choice(completion), num_tokens

    def _take(self, message: Message, calls: list[Message]) -> None:
        kept = {key: message.get(key) for key in ("role", "content", "tool_calls")}
        self.messages.append(kept)
        for call in calls:
            output = run_call(call, self._options)
            self.messages.append(
                {"role": "tool", "tool_call_id": call.get("id"), "content": output}
            )


def last_calls(messages: list[Message]) -> list[Message]:
    """The last assistant messages, each with its outputs, that are at most half of the text."""
    sizes = [len(json.dumps(message)) for message in messages]
    room = sum(sizes) // 2
    begin = len(messages)
    for at in range(len(messages) - 1, 0, -1):
        room -= sizes[at]
        if room < 0:
            break
        if messages[at]["role"] == "assistant":
            begin = at
    return messages[begin:]


def play(endpoint: Endpoint, instruction: str, options: argparse.Namespace) -> str:
    """Do the whole task and return the last answer's text."""
    turns, limit_tokens = iter(range(options.max_turns)), options.context_tokens
    main = Conversation(
        endpoint, options, role=MAIN, instruction=instruction, limit_tokens=limit_tokens
    )
    if options.scout_turns:
        scout = Conversation(
            endpoint,
            options,
            role=SUB_AGENT,
            instruction=instruction,
            limit_tokens=limit_tokens // 2,
        )
        report = scout.run(itertools.islice(turns, options.scout_turns))
        report = scout.summarize(turns) if report is None else report
        main.messages = [opening(instruction, report), *scout.messages[1:]]
    return main.run(turns) or main.limit


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gyre-agent", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--instruction-file", required=True, metavar="FILE", help="the task, as text")
    add("--model", default=os.environ.get("OPENAI_MODEL", "policy"), help="default OPENAI_MODEL")
    add("--max-turns", type=int, default=24, help="model calls before giving up (24)")
    add("--max-output-tokens", type=int, default=24, help="new tokens per model call (24)")
    add("--context-tokens", type=int, default=0, help="end once a turn used this many (0: never)")
    add("--compact-at-tokens", type=int, default=0, help="begin anew at this many (0: never)")
    add("--scout-turns", type=int, default=0, help="turns of a sub-agent that begins (0: none)")
    add("--call-timeout-s", type=float, default=30.0, help="limit of one bash call (30)")
    add("--max-output-bytes", type=int, default=4000, help="limit of one call's output (4000)")
    add("--request-timeout-s", type=float, default=600.0, help="silence of the endpoint (600)")
    add("--max-retries", type=int, default=8, help="retries of one request (8)")
    add("--stream", action="store_true", help="ask for server-sent events")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    try:
        with open(options.instruction_file, encoding="utf-8") as file:
            instruction = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"gyre-agent: cannot read the instruction: {error}\n")
        return 2
    base_url = os.environ.get("OPENAI_BASE_URL", "")
    if not base_url or not instruction:
        missing = "the instruction is empty" if base_url else "OPENAI_BASE_URL is not set"
        sys.stderr.write(f"gyre-agent: {missing}\n")
        return 2
    try:
        endpoint = Endpoint(
            base_url,
            api_key=os.environ.get("OPENAI_API_KEY", ""),
            timeout_s=options.request_timeout_s,
            max_retries=options.max_retries,
        )
        answer = play(endpoint, instruction, options)
        sys.stdout.buffer.write(answer.encode(errors="replace") + b"\n")
    except AgentError as error:
        sys.stderr.write(f"gyre-agent: {error}\n")
        return 1
    endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
