"""A scripted model endpoint that is not our gateway: the baseline that a program is compared with.

It knows the three protocols just well enough for the four programs, and nothing of tokens. Its
answers run the given commands, one a turn, and end with a last word.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opengyre.runtime.trying.solver import COMMAND_KEYS, SHELL_WORDS, SUBMIT

LAST_WORDS = "All lines are there."
SPOKEN = "I go on with the next line."
Body = dict[str, Any]


@contextlib.contextmanager
def plain_endpoint(commands: Sequence[str]) -> Iterator[str]:
    """Its address, without a path: every path prefix is answered."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            kind = self.path.partition("?")[0].rsplit("/", 1)[-1]
            events = ANSWERS[kind](body, commands)
            is_stream = bool(body.get("stream"))
            text = _as_events(kind, events) if is_stream else json.dumps(events[0])
            data = text.encode()
            self.send_response(200)
            form = "text/event-stream" if is_stream else "application/json"
            self.send_header("content-type", form)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _as_events(kind: str, events: list[Body]) -> str:
    named = kind != "completions"
    lines = [
        (f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n"
        for event in events
    ]
    return "".join(lines) + ("" if named else "data: [DONE]\n\n")


def _next_command(body: Body, commands: Sequence[str], num_done: int) -> str | None:
    if SUBMIT in json.dumps(body):
        commands = (*commands, f"echo {SUBMIT}")
    return commands[num_done] if num_done < len(commands) else None


def _shell(tools: list[Body], schema_key: str) -> tuple[str, str, Body]:
    """Name, key of the command, and arguments that its schema wants beside it."""

    def rank(tool: Body) -> int:
        name = str(tool.get("name", "")).lower()
        return next((k for k, word in enumerate(SHELL_WORDS) if word in name), 99)

    tool = min(tools, key=rank)
    properties = tool[schema_key]["properties"]
    key = next(key for key in COMMAND_KEYS if key in properties)
    more = {name: False for name in tool[schema_key].get("required", []) if name != key}
    return tool["name"], key, more


def chat(body: Body, commands: Sequence[str]) -> list[Body]:
    done = sum(len(message.get("tool_calls") or []) for message in body["messages"])
    command = _next_command(body, commands, done)
    message: Body = {"role": "assistant", "content": LAST_WORDS if command is None else SPOKEN}
    if command is not None:
        name, key, more = _shell([tool["function"] for tool in body["tools"]], "parameters")
        function = {"name": name, "arguments": json.dumps({key: command, **more})}
        call = {"index": 0, "id": f"call_{done}", "type": "function", "function": function}
        message["tool_calls"] = [call]
    finish = "stop" if command is None else "tool_calls"
    whole = {"id": f"c{done}", "created": 1, "model": "policy"}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return [whole | {"object": "chat.completion", "choices": [choice], "usage": usage}]
    chunk = whole | {"object": "chat.completion.chunk"}
    return [
        chunk | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage},
    ]


def messages(body: Body, commands: Sequence[str]) -> list[Body]:
    blocks = [
        block
        for message in body["messages"]
        if message["role"] == "assistant" and isinstance(message["content"], list)
        for block in message["content"]
    ]
    done = sum(block["type"] == "tool_use" for block in blocks)
    command = _next_command(body, commands, done)
    usage = {"input_tokens": 9, "output_tokens": 9}
    start = {
        **{"id": f"m{done}", "type": "message", "role": "assistant", "model": "policy"},
        **{"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage},
    }
    text = LAST_WORDS if command is None else SPOKEN
    events: list[Body] = [{"type": "message_start", "message": start}]
    events += _block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": text})
    if command is not None:
        name, key, more = _shell(body["tools"], "input_schema")
        arguments = json.dumps({key: command, **more})
        events += _block(
            1,
            {"type": "tool_use", "id": f"toolu_{done}", "name": name, "input": {}},
            {"type": "input_json_delta", "partial_json": arguments},
        )
    reason = "end_turn" if command is None else "tool_use"
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [
        *events,
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]


def _block(index: int, block: Body, delta: Body) -> list[Body]:
    return [
        {"type": "content_block_start", "index": index, "content_block": block},
        {"type": "content_block_delta", "index": index, "delta": delta},
        {"type": "content_block_stop", "index": index},
    ]


def responses(body: Body, commands: Sequence[str]) -> list[Body]:
    done = sum(item.get("type") == "function_call" for item in body["input"])
    command = _next_command(body, commands, done)
    text = LAST_WORDS if command is None else SPOKEN
    content = [{"type": "output_text", "text": text, "annotations": []}]
    items: list[Body] = [
        {"type": "message", "id": f"msg_{done}", "role": "assistant", "content": content}
    ]
    if command is not None:
        functions = [tool for tool in body["tools"] if tool["type"] == "function"]
        name, key, more = _shell(functions, "parameters")
        call = {"type": "function_call", "id": f"fc_{done}", "call_id": f"call_{done}"}
        items.append(call | {"name": name, "arguments": json.dumps({key: command, **more})})
    usage = {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18}
    whole = {"id": f"resp_{done}", "object": "response", "output": items, "usage": usage}
    return [
        {"type": "response.created", "response": {"id": f"resp_{done}", "object": "response"}},
        *(
            {"type": "response.output_item.done", "output_index": index, "item": item}
            for index, item in enumerate(items)
        ),
        {"type": "response.completed", "response": whole | {"status": "completed"}},
    ]


ANSWERS = {"completions": chat, "messages": messages, "responses": responses}
