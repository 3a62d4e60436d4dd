"""The shipped model folder, and whole tasks played by the real agent over its chat endpoint."""

import json
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "model"
sys.path.insert(0, str(QUICKSTART))

import chat  # noqa: E402
import families  # noqa: E402
import make_tasks  # noqa: E402
import make_tokenizer  # noqa: E402
import rollout  # noqa: E402
import scripted_policy  # noqa: E402
import warm_start  # noqa: E402
from demonstrator import NOISY, Dice  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from opengyre.harness import gyre_agent  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> chat.RendererTokenizer:
    return chat.load_tokenizer(MODEL)


class PolicyHandler(BaseHTTPRequestHandler):
    """A chat endpoint for one conversation, played by the scripted policy through the renderer."""

    protocol_version = "HTTP/1.1"
    server: "PolicyServer"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.server.turn(request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


class PolicyServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tokenizer: chat.RendererTokenizer, *, seed: int, mistake_rate: float):
        super().__init__(("127.0.0.1", 0), PolicyHandler)
        self.tokenizer = tokenizer
        self.renderer = chat.make_renderer(tokenizer)
        self.seed, self.mistake_rate = seed, mistake_rate
        self.talk: chat.Conversation | None = None

    def turn(self, request: dict) -> dict:
        messages = request["messages"]
        if self.talk is None:
            self.talk = chat.Conversation(self.renderer, self.tokenizer, messages[0]["content"])
        else:
            self.talk.answer(messages[-1]["content"])
        assert self.talk.prompt_ids == self.rendered_afresh(request)
        text = self.tokenizer.decode(self.talk.prompt_ids)
        self.talk.write(scripted_policy.respond(text, self.seed, mistake_rate=self.mistake_rate))
        message = {"role": "assistant", "content": "done"}
        if (command := self.talk.command()) is not None:
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    def rendered_afresh(self, request: dict) -> list[int]:
        messages = [
            dict(message, content=message["content"] or "") for message in request["messages"]
        ]
        return self.renderer.render_ids(
            messages, tools=request["tools"], add_generation_prompt=True
        )


def play_with_agent(server: PolicyServer, task_folder: Path, verifier: Path) -> float:
    """Run the agent on a task folder, then its tests; returns the reward."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    workspace = task_folder / "environment" / "workspace"
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    environment = {"PATH": "/usr/bin:/bin", "OPENAI_BASE_URL": url}
    program = [sys.executable, "-I", "-S", gyre_agent.__file__, "--instruction-file"]
    try:
        subprocess.run(
            [*program, str(task_folder / "instruction.md")],
            cwd=workspace,
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    environment |= {"GYRE_WORKSPACE": str(workspace), "GYRE_VERIFIER_DIR": str(verifier)}
    subprocess.run(["bash", task_folder / "tests" / "test.sh"], env=environment, check=True)
    return float((verifier / "reward.txt").read_text())


@pytest.mark.parametrize(("mistake_rate", "low", "high"), [(0.0, 1.0, 1.0), (1.0, 0.0, 0.99)])
def test_whole_tasks_are_played_by_the_agent_and_graded(
    mistake_rate: float, low: float, high: float, tokenizer: chat.RendererTokenizer, tmp_path: Path
):
    make_tasks.make_tasks(21, 4, tmp_path / "tasks", [])
    rewards = []
    for folder in sorted((tmp_path / "tasks").iterdir()):
        server = PolicyServer(tokenizer, seed=1, mistake_rate=mistake_rate)
        rewards.append(play_with_agent(server, folder, tmp_path / "verifier" / folder.name))
    assert low <= sum(rewards) / len(rewards) <= high


def test_numbers_and_phrases_are_few_tokens(tokenizer: chat.RendererTokenizer):
    assert all(len(tokenizer.encode(f"{number:02d}")) == 1 for number in range(100))
    talk = chat.Conversation(
        chat.make_renderer(tokenizer), tokenizer, families.TRAIL_TEXT.format(37)
    )
    sizes = [len(talk.ids)]
    for command, output in [("cat 37", "sum 58 next 12"), ("echo 58 >> out", "")]:
        before = len(talk.ids)
        talk.write(chat.call_text(command))
        sizes.append(len(talk.ids) - before)
        assert talk.command() == command
        talk.answer(output)
        sizes.append(len(talk.ids) - before - sizes[-1])
    assert sizes == [18, 6, 15, 6, 11]


def test_any_text_survives_the_tokenizer(tokenizer: chat.RendererTokenizer):
    text = "Größe: 12345 \t\n «<tool_call>» 漢字 \x00 end"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_shipped_tokenizer_is_the_one_its_script_makes(tokenizer: chat.RendererTokenizer):
    made = make_tokenizer.make_tokenizer(1).to_str(pretty=True)
    assert (MODEL / "tokenizer.json").read_text() == made + "\n"


def test_the_folder_is_small_and_loads_with_tied_weights():
    assert (MODEL / "model.safetensors").stat().st_size < 12 * 2**20
    with safe_open(MODEL / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118 - not a mapping
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.max_position_embeddings >= 1024


def test_the_model_finds_demonstrations_likely_and_succeeds_sometimes(
    tokenizer: chat.RendererTokenizer,
):
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(MODEL).eval()
    tasks = families.draw_tasks(31, 32)
    dice = Dice(rng=random.Random(1), mistakes=NOISY)
    talks = [warm_start.demonstrate(tokenizer, task, dice) for task in tasks[:8]]
    ids, weights = warm_start.make_batch(talks, model.config.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    assert losses[weights == 1.0].mean() < 0.4
    played = rollout.play_all(model, tokenizer, tasks, seed=1)
    assert 0.2 < rollout.mean_reward(played) < 0.6
