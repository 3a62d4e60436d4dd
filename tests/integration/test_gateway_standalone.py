"""`gyre gateway`: exact records of whoever talks to it, over token servers that come and go."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served_app import served
from tokenizers import Tokenizer
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.engines.letters import letters, letters_policy
from opengyre.engines.scripted import ScriptedConfig, ScriptedEngine
from opengyre.engines.token_server import ALL_WIRES, TokenServer
from opengyre.runtime.recording.standalone import Ready, StandaloneSettings, Totals, serve
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.records import TokenRecord
from opengyre.store.segments import SegmentReader, segment_numbers

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
GYRE = Path(sys.executable).with_name("gyre")
HELLO = [{"role": "user", "content": "say hello"}]
NUM_TOKENS = 40
DEADLINE_S = 60.0


class RememberingEngine(ScriptedEngine):
    """Keeps the requests that it was given."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(
            letters_policy(TOKENIZER, NUM_TOKENS),
            ScriptedConfig(tokens_per_s=tokens_per_s, max_running=64),
        )
        self.requests: list[GenerateRequest] = []

    def submit(self, request: GenerateRequest) -> Any:
        if request.max_new_tokens > 1:
            self.requests.append(request)
        return super().submit(request)


def token_server(*, tokens_per_s: float = 0.0, wires: frozenset[str] = ALL_WIRES) -> TokenServer:
    engine = RememberingEngine(tokens_per_s)
    return TokenServer(engine=engine, tokenizer=TOKENIZER, wires=wires)


class Desk:
    """A gateway that runs: clients for it, and its end."""

    def __init__(self, ready: Ready, until: asyncio.Event, serving: "asyncio.Task[Totals]") -> None:
        self.ready = ready
        self._until = until
        self._serving = serving

    def client(self, name: str = "bob", key: str = "key-1") -> openai.AsyncOpenAI:
        base = f"{self.ready.address}/{name}/v1" if name else f"{self.ready.address}/v1"
        return openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)

    async def ask(self, name: str = "bob", messages: Any = HELLO) -> str:
        async with self.client(name) as client:
            answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.content or ""

    async def stream(self, name: str = "bob") -> AsyncIterator[str]:
        async with self.client(name) as client:
            chunks = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            async for chunk in chunks:
                yield chunk.choices[0].delta.content or ""

    async def end(self) -> Totals:
        self._until.set()
        return await self._serving


@asynccontextmanager
async def standalone(out: Path, *urls: str, **settings: Any) -> AsyncIterator[Desk]:
    until = asyncio.Event()
    opened: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    asked = StandaloneSettings(engines=urls, model=MODEL, out=out, **{"key": "key-1", **settings})
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(asked, on_ready=opened.set_result, until=until))
        await asyncio.wait([opened, serving], return_when=asyncio.FIRST_COMPLETED)
        yield Desk(await opened if opened.done() else serving.result(), until, serving)  # type: ignore[arg-type]
        until.set()


def records(out: Path) -> list[TokenRecord]:
    reader = SegmentReader(out / "tokens")
    return [one for n in segment_numbers(out / "tokens") for one in reader.scan(n)]


async def leave(url: str, *, for_s: float) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/scripted/leave", json={"for_s": for_s})


def is_whole(text: str) -> bool:
    """All letters of the scripted answer, each once and in order."""
    return text in {letters(first, NUM_TOKENS) for first in range(26)}


@pytest.mark.parametrize("wire", ["/inference/v1/generate", "/v1/completions", "/generate"])
def test_what_is_recorded_is_what_the_engine_got_and_gave(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        server = token_server(wires=frozenset([wire]))
        async with served(server.app()) as url, standalone(tmp_path, url) as desk:
            text = await desk.ask()
            more = [*HELLO, {"role": "assistant", "content": text}, *HELLO]
            await desk.ask(messages=more)
            totals = await desk.end()
        assert is_whole(text)
        first, second = records(tmp_path)
        sent = [one.prompt_ids for one in server.engine.requests]  # type: ignore[attr-defined]
        assert sent == [
            first.new_prompt_ids,
            first.new_prompt_ids + first.completion_ids + second.new_prompt_ids,
        ]
        assert TOKENIZER.decode(first.completion_ids) == text
        assert len(first.logprobs) == len(first.completion_ids) == NUM_TOKENS + 1
        assert second.header.parent == first.header.turn == "bob.t1"
        assert (totals.num_turns, totals.num_sessions, totals.num_cut) == (2, 1, 0)

    asyncio.run(main())


def test_an_engine_that_dies_in_mid_stream_is_replaced_and_the_text_is_whole(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        dying, other = token_server(tokens_per_s=100), token_server(tokens_per_s=100)
        async with (
            served(dying.app()) as url,
            served(other.app()) as other_url,
            standalone(tmp_path, url, other_url) as desk,
        ):
            text = ""
            async for part in desk.stream():
                text += part
                if len(text) >= 5 and not dying.is_away:
                    await leave(url, for_s=60)
            totals = await desk.end()
        assert is_whole(text)
        (record,) = records(tmp_path)
        assert [span.engine for span in record.header.spans] == ["s0", "s1"]
        assert record.header.num_continuations == totals.num_moves == 1
        assert len(record.logprobs) == NUM_TOKENS + 1

    asyncio.run(main())


def test_while_every_engine_is_away_a_call_is_held_and_goes_on_when_one_is_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        server = token_server(tokens_per_s=200)
        async with served(server.app()) as url, standalone(tmp_path, url) as desk:
            text = ""
            async for part in desk.stream():
                text += part
                if len(text) >= 5 and not server.away_until_s:
                    await leave(url, for_s=1.0)
            assert is_whole(text)
            await desk.end()
        (record,) = records(tmp_path)
        assert record.header.held_s > 0.3
        assert {span.engine for span in record.header.spans} == {"s0"}

    asyncio.run(main())


def test_sessions_are_spread_over_the_engines(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = token_server(tokens_per_s=400), token_server(tokens_per_s=400)
        async with (
            served(one.app()) as url,
            served(two.app()) as other_url,
            standalone(tmp_path, url, other_url) as desk,
        ):
            texts = await asyncio.gather(*(desk.ask(f"agent-{n}") for n in range(6)))
            await desk.end()
        assert all(is_whole(text) for text in texts)
        nums = [len(server.engine.requests) for server in (one, two)]  # type: ignore[attr-defined]
        assert nums == [3, 3]

    asyncio.run(main())


def test_a_restart_on_the_same_folder_goes_on_with_the_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        server = token_server()
        async with served(server.app()) as url:
            async with standalone(tmp_path, url) as desk:
                text = await desk.ask()
                await desk.end()
            async with standalone(tmp_path, url) as desk:
                assert desk.ready.num_known_sessions == 1
                await desk.ask(messages=[*HELLO, {"role": "assistant", "content": text}, *HELLO])
                await desk.ask("amy")
                await desk.end()
        first, second, third = records(tmp_path)
        assert second.header.turn == "bob.t2"
        assert second.header.parent == "bob.t1"
        assert second.header.num_kept_tokens == len(first.new_prompt_ids + first.completion_ids)
        assert (third.header.turn, third.header.parent) == ("amy.t1", "")

    asyncio.run(main())


def test_any_name_opens_a_session_for_the_key_and_none_without_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            served(token_server().app()) as url,
            standalone(tmp_path, url) as desk,
            httpx.AsyncClient(base_url=desk.ready.address) as client,
        ):

            async def status(path: str, key: str) -> int:
                answer = await client.get(path, headers={"authorization": f"Bearer {key}"})
                return answer.status_code

            assert await status("/amy/v1/models", "key-1") == 200
            assert await status("/v1/models", "key-1") == 200
            assert await status("/eve/v1/models", "key-2") == 401
            assert await status("/amy/v1/models", "key-2") == 401
            assert await status("/%20/v1/models", "key-1") == 400
            assert await status(f"/{'x' * 129}/v1/models", "key-1") == 400
            assert await status("/%20/v1/models", "key-2") == 401
            totals = await desk.end()
            assert totals.num_sessions == 2

    asyncio.run(main())


def test_the_calls_of_a_harness_are_labelled_by_its_profile(tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(
        '[[labels]]\nrole = "side"\nall = [{ text = "last_user", matches = "^title" }]\n'
    )

    async def main() -> None:
        async with (
            served(token_server().app()) as url,
            standalone(tmp_path / "out", url, profile=str(profile)) as desk,
        ):
            await desk.ask()
            await desk.ask(messages=[{"role": "user", "content": "title please"}])
            await desk.end()
        assert [one.header.role for one in records(tmp_path / "out")] == ["main", "side"]

    asyncio.run(main())


@contextmanager
def process(*argv: object, **how: Any) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [str(one) for one in argv], stdout=subprocess.PIPE, text=True, **how
    ) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def engine_process(port: int, *more: object) -> Iterator["subprocess.Popen[str]"]:
    argv = ["-m", "opengyre.engines.token_server", "--model", MODEL, "--port", port]
    speed = ["--tokens-per-s", 30, "--num-tokens", NUM_TOKENS]
    with process(sys.executable, *argv, *speed, *more) as started:
        wait_for(f"http://127.0.0.1:{port}")
        yield started


@contextmanager
def gateway_process(
    out: Path, *ports: int, before: Sequence[str] = (), **how: Any
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """`gyre gateway --json`, and the line it printed when it was ready."""
    asked = [part for port in ports for part in ("--engine", f"http://127.0.0.1:{port}")]
    argv = [*before, GYRE, "gateway", *asked, "--model", MODEL, "--json", "--out", out]
    with process(*argv, **how) as started:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())


def streamed(stack: ExitStack, ready: dict[str, Any], messages: Any = HELLO) -> Iterator[str]:
    base = f"{ready['address']}/v1"
    client = openai.OpenAI(base_url=base, api_key=ready["key"], max_retries=0)
    stack.enter_context(client)
    made = client.chat.completions.create(model="m", messages=messages, stream=True)
    return (chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)


def ended(gateway: "subprocess.Popen[str]") -> tuple[int, dict[str, int]]:
    """After Ctrl-C: the exit code and some of what it printed."""
    gateway.send_signal(signal.SIGINT)
    assert gateway.stdout is not None
    end = json.loads(gateway.stdout.readline())
    return gateway.wait(timeout=20), {k: end[k] for k in ("num_turns", "num_moves", "num_cut")}


def wait_for(url: str) -> None:
    for _ in range(200):
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            signal.sigtimedwait([], 0.1)
        else:
            return
    raise TimeoutError(url)


def test_a_killed_engine_process_costs_a_client_nothing_and_ctrl_c_ends_in_order(
    tmp_path: Path,
) -> None:
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(port)) for port in ports]
        gateway, ready = stack.enter_context(gateway_process(tmp_path / "out", *ports))
        text = ""
        for part in streamed(stack, ready):
            text += part
            if len(text) >= 6 and engines[0].poll() is None:
                engines[0].kill()
                engines[0].wait()
        assert ended(gateway) == (0, {"num_turns": 1, "num_moves": 1, "num_cut": 0})
    assert is_whole(text)
    (record,) = records(tmp_path / "out")
    assert record.header.execution == "default"
    assert TOKENIZER.decode(record.completion_ids) == text


def test_a_killed_gateway_goes_on_from_its_records_and_a_cut_call_is_exit_code_3(
    tmp_path: Path,
) -> None:
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(engine_process(port))
        first, ready = stack.enter_context(gateway_process(tmp_path / "out", port))
        text = "".join(streamed(stack, ready))
        first.kill()
        first.wait()
        second, ready = stack.enter_context(gateway_process(tmp_path / "out", port))
        assert ready["num_known_sessions"] == 1
        more = [*HELLO, {"role": "assistant", "content": text}, *HELLO]
        next(streamed(stack, ready, more))
        assert ended(second) == (3, {"num_turns": 1, "num_moves": 0, "num_cut": 1})
    whole, cut = records(tmp_path / "out")
    assert (whole.header.is_committed, cut.header.is_committed) == (True, False)
    assert cut.header.parent == whole.header.turn == "default.t1"


def test_a_disk_that_takes_no_more_ends_the_gateway_in_one_line(tmp_path: Path) -> None:
    port = free_port()
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "limited"]
    with ExitStack() as stack:
        stack.enter_context(engine_process(port, "--num-tokens", 700, "--tokens-per-s", 0))
        how = {"before": limited, "stderr": subprocess.PIPE}
        gateway, ready = stack.enter_context(gateway_process(tmp_path / "out", port, **how))
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            "".join(part for _ in range(4) for part in streamed(stack, ready))
        assert gateway.wait(timeout=20) == 1
        assert gateway.stderr is not None
        assert gateway.stderr.read() == "gyre: tokens: segment 0: File too large\n"


def test_a_call_that_still_runs_at_the_end_is_cut_recorded_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        server = token_server(tokens_per_s=20)
        async with served(server.app()) as url, standalone(tmp_path, url) as desk:
            parts = desk.stream()
            await anext(parts)
            totals = await desk.end()
            with pytest.raises((httpx.HTTPError, openai.APIError)):
                async for _ in parts:
                    pass
            assert totals.num_cut == 1
        (record,) = records(tmp_path)
        assert not record.header.is_committed

    asyncio.run(main())


def refusal(*argv: object) -> str:
    """The lines of a `gyre gateway` that the user's input did not let start."""
    made = CliRunner().invoke(app, ["gateway", *(str(one) for one in argv)])
    assert made.exit_code == 2, made.output
    assert "Traceback" not in made.output
    return made.output


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    text = refusal("--engine", url, "--model", MODEL, "--out", tmp_path / "out")
    assert re.search(rf"{url} cannot be reached", text)
    assert not (tmp_path / "out").exists()


def test_an_engine_that_gives_only_text_is_refused(tmp_path: Path) -> None:
    port = free_port()
    with engine_process(port, "--wire", "/v1/chat/completions"):
        url = f"http://127.0.0.1:{port}/v1"
        text = refusal("--engine", url, "--model", MODEL, "--out", tmp_path / "out")
    assert "it gives no token ids with logprobs" in text


@pytest.fixture
def engine_url() -> Iterator[str]:
    port = free_port()
    with engine_process(port):
        yield f"http://127.0.0.1:{port}"


def test_input_that_cannot_work_is_one_clear_line_each(tmp_path: Path, engine_url: str) -> None:
    engine, out = ("--engine", engine_url), ("--out", tmp_path / "out")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert "tokenizer.json" in refusal(*engine, "--model", nothing, *out)
    shutil.copy(MODEL / "tokenizer.json", nothing)
    assert "config.json" in refusal(*engine, "--model", nothing, *out)
    (nothing / "config.json").write_text('{"model_type": "nobody-knows"}')
    assert "nobody-knows" in refusal(*engine, "--model", nothing, *out)
    here = ("--model", MODEL)
    assert "something else than records" in refusal(*engine, *here, "--out", nothing)
    assert "not a folder of gyre gateway" in refusal(*engine, *here, "--out", MODEL.parent)
    assert "auto, vllm, sglang" in refusal(*engine, *here, *out, "--kind", "openai")
    assert "no such harness" in refusal(*engine, *here, *out, "--profile", "nobody")
    assert "address" in refusal("--engine", "localhost:8000", *here, *out)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal(*engine, *here, *out, "--port", port)


def test_a_folder_of_another_tokenizer_or_one_in_use_is_refused(
    tmp_path: Path, engine_url: str
) -> None:
    async def main() -> None:
        async with standalone(tmp_path, engine_url) as desk:
            await desk.ask()
            with pytest.raises(BaseExceptionGroup) as raised:
                async with standalone(tmp_path, engine_url):
                    pass
            assert "another gyre gateway records into it" in repr(raised.value)
            await desk.end()

    asyncio.run(main())
    manifest = json.loads((tmp_path / "config.json").read_text())
    assert "key-1" not in (tmp_path / "config.json").read_text()
    manifest["tokenizer_sha256"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(manifest))
    text = refusal("--engine", engine_url, "--model", MODEL, "--out", tmp_path)
    assert "another tokenizer" in text
    assert os.path.exists(tmp_path / "tokens")
