"""What only the embedded engine has: prefix reuse, prefill in chunks, a shared module, refusal."""

import asyncio
import contextlib
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_under_test import all_chunks, prompt_of, request, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from opengyre.config.load import load_config
from opengyre.engines.compute import ComputeThread
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.engines.torch_engine.model import load_model, refuse_unsupported
from opengyre.runtime.embedded import build_engine
from opengyre.runtime.messages import CellSetup
from opengyre.seams.engine import Finish, GenerateRequest
from opengyre.seams.errors import BoundaryError, ConfigError
from opengyre.seams.weights import Snapshot
from opengyre.transport.chunk_stream import collect
from opengyre.transport.weights_tcp import TcpPlane

CONFIG = """
[run]
dir = "runs"
num_steps = 1
[model]
path = "model"
[sampling]
context_tokens = 64
max_new_tokens = 16
[[tasks]]
path = "tasks"
"""
Scene = Callable[[TorchEngine, Any], Awaitable[None]]


def play(scene: Scene, *, model: Any = None, **settings: Any) -> None:
    model = tiny_model("qwen3", is_tied=True, seed=0) if model is None else model
    chosen = {"max_running": 8, "context_tokens": 128, "step_tokens": 64} | settings

    async def main() -> None:
        compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
        engine = TorchEngine(model, TorchEngineConfig(**chosen), compute)
        try:
            async with asyncio.timeout(60):
                await scene(engine, model)
        finally:
            await engine.pause()
            compute.close()

    asyncio.run(main())


def reference(model: Any, asked: GenerateRequest, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([asked.prompt_ids + ids])).logits[0]
    rows = logits[len(asked.prompt_ids) - 1 : -1]
    rows = (rows.float() if rows.dtype == torch.bfloat16 else rows) / (asked.temperature or 1.0)
    rows = rows.log_softmax(-1)
    values: list[float] = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return values


@pytest.mark.parametrize("num_kv_slots", [8, 24])
def test_turns_and_groups_reuse_prefixes_and_keep_their_logprobs(num_kv_slots: int) -> None:
    """A group of eight shares a prompt; each execution then goes on from its own first turn."""

    async def scene(engine: TorchEngine, model: Any) -> None:
        shared = prompt_of(30)
        await collect(engine.submit(request(999, shared, 1)))
        turns = [request(number, shared, 9, seed=number) for number in range(8)]
        made = await asyncio.gather(*(collect(engine.submit(one)) for one in turns))
        assert engine.stats().num_reused_tokens >= 8 * 29
        nexts = [
            request(100 + n, shared + one.ids + prompt_of(5, seed=n), 7, seed=n)
            for n, one in enumerate(made)
        ]
        before = engine.stats().num_reused_tokens
        more = await asyncio.gather(*(collect(engine.submit(one)) for one in reversed(nexts)))
        assert engine.stats().num_reused_tokens - before >= 8 * 38
        for asked, one in zip(turns + nexts[::-1], made + more, strict=True):
            assert one.logprobs == pytest.approx(reference(model, asked, one.ids), abs=1e-4)

    play(scene, num_kv_slots=num_kv_slots)


def test_prompts_longer_than_a_step_are_computed_in_chunks_beside_decodes() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        lengths = (3, 100, 17, 64, 40, 33, 90, 1)
        asked = [request(n, prompt_of(length), 12, seed=n) for n, length in enumerate(lengths)]
        made = await asyncio.gather(*(collect(engine.submit(one)) for one in asked))
        for one, chunk in zip(asked, made, strict=True):
            assert chunk.logprobs == pytest.approx(reference(model, one, chunk.ids), abs=1e-4)
        assert engine.stats().num_prefill_tokens >= sum(lengths) - len(lengths)

    play(scene, step_tokens=16)


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_distribution_cut_to_its_likeliest_token_is_greedy_and_certain(
    cut: dict[str, float],
) -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        greedy = await collect(engine.submit(request(1, prompt_of(12), 10, temperature=0.0)))
        made = await collect(engine.submit(request(2, prompt_of(12), 10, seed=3, **cut)))
        assert made.ids == greedy.ids
        assert made.logprobs == pytest.approx([0.0] * 10, abs=1e-6)
        free = await collect(engine.submit(request(3, prompt_of(12), 10, seed=3)))
        assert free.ids != greedy.ids

    play(scene)


def test_a_short_prompt_behind_a_long_one_has_its_first_token_soon_and_decodes_go_on() -> None:
    """What decodes makes a token in each step, so its tokens count the steps."""

    async def scene(engine: TorchEngine, model: Any) -> None:
        seen: list[str] = []

        async def follow(name: str, asked: GenerateRequest) -> None:
            async for chunk in engine.submit(asked):
                seen.extend([name] * len(chunk.ids))
                if name == "decoding" and len(seen) == 3:
                    others.create_task(follow("long", request(2, prompt_of(2000), 3)))
                if name == "decoding" and len(seen) == 6:
                    others.create_task(follow("short", request(3, prompt_of(40), 5)))

        async with asyncio.TaskGroup() as others:
            await follow("decoding", request(1, prompt_of(4), 60))
        num_steps = [seen[: seen.index(name)].count("decoding") for name in ("short", "long")]
        assert num_steps[0] <= 6 + 4
        assert num_steps[1] >= 3 + 2000 // 63

    model = tiny_model("llama", is_tied=True, seed=0, positions=2048)
    play(scene, model=model, context_tokens=2048)


@pytest.mark.parametrize("num_own_tokens", [0, 10])
def test_a_group_that_starts_together_computes_its_prompt_once(num_own_tokens: int) -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        prompts = [prompt_of(90) + prompt_of(num_own_tokens, seed=n) for n in range(8)]
        asked = [request(n, prompt, 9, seed=n) for n, prompt in enumerate(prompts)]
        made = await asyncio.gather(*(collect(engine.submit(one)) for one in asked))
        assert engine.stats().num_prefill_tokens <= 90 + 8 * (num_own_tokens + 1)
        assert engine.stats().num_reused_tokens >= 7 * 89
        for one, chunk in zip(asked, made, strict=True):
            assert chunk.logprobs == pytest.approx(reference(model, one, chunk.ids), abs=1e-4)

    play(scene, step_tokens=32)


def test_a_group_goes_on_when_the_one_it_waits_for_is_cancelled() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        asked = [request(n, prompt_of(120), 5, seed=n) for n in range(4)]
        streams = [engine.submit(one) for one in asked]
        while engine.stats().num_prefill_tokens == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.cancel("r0")
        made = [await collect(one) for one in streams]
        assert [one.finish for one in made] == [Finish.CANCELLED] + [Finish.LENGTH] * 3
        for one, chunk in zip(asked[1:], made[1:], strict=True):
            assert chunk.logprobs == pytest.approx(reference(model, one, chunk.ids), abs=1e-4)

    play(scene, step_tokens=8)


def test_requests_far_apart_in_the_pool_decode_the_same() -> None:
    """Two left of many: their slots are gathered, or spanned with masked rows between them."""

    async def scene(engine: TorchEngine, model: Any) -> None:
        for kept in ((0, 15), (0, 3), (3, 4, 9)):
            asked = [
                request(n, prompt_of(6 + n, seed=n), 40 if n in kept else 2, seed=n)
                for n in range(16)
            ]
            made = await asyncio.gather(*(collect(engine.submit(one)) for one in asked))
            for n in kept:
                expected = reference(model, asked[n], made[n].ids)
                assert made[n].logprobs == pytest.approx(expected, abs=1e-4)

    play(scene, max_running=16)


def test_the_module_keeps_its_own_attention_and_can_train_between_steps() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        before = model.config._attn_implementation
        stream = engine.submit(request(1, prompt_of(6), 50))
        await anext(stream)
        await engine.freeze("r1")
        assert model.config._attn_implementation == before
        loss = model(torch.tensor([prompt_of(9)])).logits.square().mean()
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        assert all(not weight.is_inference() for weight in model.parameters())

    play(scene)


def test_an_update_writes_in_place_and_keeps_tied_weights_tied() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        places = {name: one.data_ptr() for name, one in model.named_parameters()}
        fresh = tiny_model("qwen3", is_tied=True, seed=5)
        await engine.pause()
        await engine.begin_update(1)
        for name, tensor in fresh.state_dict().items():
            await engine.push(name, tensor.numpy())
        await engine.commit(1)
        assert {name: one.data_ptr() for name, one in model.named_parameters()} == places
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert torch.equal(model.lm_head.weight, fresh.lm_head.weight)

    play(scene)


def test_a_bfloat16_model_generates_and_takes_its_weights_as_bits() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        fresh = tiny_model("llama", is_tied=True, seed=6).to(torch.bfloat16)
        await engine.pause()
        await engine.begin_update(1)
        for name, tensor in fresh.named_parameters():
            await engine.push(name, tensor.detach().view(torch.uint16).numpy())
        await engine.commit(1)
        await engine.resume()
        for name, tensor in model.named_parameters():
            assert torch.equal(tensor, fresh.get_parameter(name))
        asked = request(1, prompt_of(9), 12, temperature=0.0)
        made = await collect(engine.submit(asked))
        expected = reference(fresh.float(), asked, made.ids)
        assert made.logprobs == pytest.approx(expected, abs=0.5)

    play(scene, model=tiny_model("llama", is_tied=True, seed=0).to(torch.bfloat16))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_logprobs_of_a_bfloat16_model_are_near_those_of_transformers(
    family: str, temperature: float
) -> None:
    """Both round to 8 bits after each operation, not in the same places: ours are as near to those
    of the same weights in float32."""

    async def scene(engine: TorchEngine, model: Any) -> None:
        asked = [
            request(n, prompt_of(5 + 9 * n, seed=n), 16, temperature=temperature, seed=n)
            for n in range(8)
        ]
        made = await asyncio.gather(*(collect(engine.submit(one)) for one in asked))
        ids = [one.ids for one in made]
        made = [row for one in made for row in one.logprobs]
        theirs = [row for n, one in enumerate(asked) for row in reference(model, one, ids[n])]
        exact = [row for n, one in enumerate(asked) for row in reference(whole, one, ids[n])]
        ours_off, theirs_off = np.abs(np.subtract([made, theirs], exact)).mean(1)
        assert ours_off < 1.5 * theirs_off
        assert np.abs(np.subtract(made, theirs)).mean() < 0.05
        assert np.abs(np.subtract(made, theirs)).max() < 0.4

    whole = tiny_model(family, is_tied=False, seed=3).to(torch.bfloat16).float()
    play(scene, model=tiny_model(family, is_tied=False, seed=3).to(torch.bfloat16))


def test_the_checksum_is_that_of_the_snapshot_the_weights_came_from() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        weights = {
            name: one.detach().numpy()
            for name, one in tiny_model("qwen3", is_tied=True, seed=5).named_parameters()
        }
        with contextlib.closing(TcpPlane()) as plane:
            snapshot = Snapshot(version=1, parts=[plane.expose(weights, 1)])
        await engine.pause()
        await engine.begin_update(1)
        for spec in snapshot.tensors:
            await engine.push(spec.name, weights[spec.name])
        await engine.commit(1)
        assert engine.checksum == snapshot.checksum

    play(scene)


def test_two_names_of_a_tied_weight_with_different_numbers_are_refused() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        weights = tiny_model("qwen3", is_tied=False, seed=5).state_dict()
        await engine.pause()
        await engine.begin_update(1)
        await engine.push("model.embed_tokens.weight", weights["model.embed_tokens.weight"])
        with pytest.raises(BoundaryError, match=r"lm_head.weight is tied"):
            await engine.push("lm_head.weight", weights["lm_head.weight"])
        with pytest.raises(BoundaryError):
            await engine.resume()

    play(scene)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.bias", torch.zeros(32), "no weight"),
        ("model.norm.weight", torch.zeros(31), "shape"),
        ("model.norm.weight", torch.full((32,), torch.inf), "not finite"),
    ],
)
def test_a_push_that_cannot_be_is_refused_by_name(
    name: str, tensor: torch.Tensor, words: str
) -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        before = model.model.norm.weight.clone()
        await engine.pause()
        await engine.begin_update(1)
        with pytest.raises(BoundaryError, match=words) as caught:
            await engine.push(name, tensor)
        assert name in str(caught.value)
        assert torch.equal(model.model.norm.weight, before)

    play(scene)


def test_logits_that_are_not_finite_end_the_request_and_spoil_no_other() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        asked = request(1, prompt_of(8), 6, seed=1)
        whole = await collect(engine.submit(asked))
        with torch.no_grad():
            sound = model.model.embed_tokens.weight[3].clone()
            model.model.embed_tokens.weight[3] = torch.nan
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            model.lm_head.weight[3] = sound
        made = await collect(engine.submit(request(2, [3] * 50, 6)))
        assert made.finish is Finish.ERROR
        assert "not finite" in made.reason
        with torch.no_grad():
            model.model.embed_tokens.weight[3] = sound
        same = request(3, [3] * 50, 6)
        made = await collect(engine.submit(same))
        assert made.logprobs == pytest.approx(reference(model, same, made.ids), abs=1e-4)
        with torch.no_grad():
            model.model.embed_tokens.weight[3] = torch.nan
        assert (await collect(engine.submit(same))).finish is Finish.ERROR
        with torch.no_grad():
            model.model.embed_tokens.weight[3] = sound
        asked = [request(10 + n, prompt_of(8), 6, seed=1) for n in range(7)]
        longer = request(20, prompt_of(60), 6, seed=1)
        again = await asyncio.gather(*(collect(engine.submit(one)) for one in [*asked, longer]))
        assert [one.finish for one in again] == [Finish.LENGTH] * 8
        assert all(one.ids == whole.ids for one in again[:-1])

    play(scene)


def test_an_id_outside_the_vocabulary_is_refused_and_harms_nobody() -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        num_ids = model.config.vocab_size
        beside = engine.submit(request(1, prompt_of(5), 20))
        for number, wrong in enumerate((num_ids, -1, 2**63), start=2):
            made = await collect(engine.submit(request(number, [1, 2, wrong], 4)))
            assert made.finish is Finish.REFUSED
            assert f"token id {wrong} " in made.reason
        assert (await collect(beside)).finish is Finish.LENGTH

    play(scene)


def test_a_step_that_fails_ends_every_request_and_needs_a_full_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(engine: TorchEngine, model: Any) -> None:
        streams = [engine.submit(request(n, prompt_of(5), 100)) for n in range(2)]
        await anext(streams[0])
        norm, model.model.norm = model.model.norm, torch.nn.LayerNorm(5)
        made = [await all_chunks(one) for one in streams]
        assert [one[-1].finish for one in made] == [Finish.ERROR, Finish.ERROR]
        model.model.norm = norm
        refused = await collect(engine.submit(request(7, prompt_of(5), 2)))
        assert "unroutable" in refused.reason
        await engine.begin_update(3)
        for name, tensor in list(model.named_parameters()):
            await engine.push(name, tensor)
        await engine.commit(3)
        await engine.resume()
        sound = await collect(engine.submit(request(8, prompt_of(5), 2)))
        assert (sound.finish, sound.policy_version) == (Finish.LENGTH, 3)

    play(scene)
    assert "needs a full load" in caplog.text


def test_release_gives_kv_memory_back_to_the_system() -> None:
    """Pages of the pool are touched as slots fill, and gone after release."""

    async def scene(engine: TorchEngine, model: Any) -> None:
        asked = [request(n, prompt_of(120, seed=n), 4) for n in range(64)]
        await asyncio.gather(*(collect(engine.submit(one)) for one in asked))
        gc.collect()
        num_bytes, before = engine.stats().kv_used_bytes, _resident_bytes()
        assert num_bytes <= engine.stats().kv_capacity_bytes == 64 * 128 * 8 * 2 * 8 * 64 * 4
        await engine.release()
        assert engine.stats().kv_capacity_bytes == engine.stats().kv_used_bytes == 0
        assert num_bytes > 30 * 2**20
        assert before - _resident_bytes() > 0.7 * num_bytes

    wide = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=128,
    )
    model = type(tiny_model("qwen3", is_tied=True, seed=0))(wide).eval()
    play(scene, model=model, max_running=64)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_saved_model_folder_loads_and_generates(tmp_path: Path) -> None:
    tiny_model("llama", is_tied=True, seed=2).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float64)
    assert loaded.model.embed_tokens.weight.dtype == torch.float64

    async def scene(engine: TorchEngine, model: Any) -> None:
        asked = request(1, prompt_of(11), 8)
        made = await collect(engine.submit(asked))
        assert made.logprobs == pytest.approx(reference(model, asked, made.ids), abs=1e-6)

    play(scene, model=loaded)


def test_an_architecture_that_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="architecture 'gpt2'") as caught:
        load_model(tmp_path)
    assert "qwen3" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding-w"),
        (Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding-w"),
        (MistralConfig(sliding_window=4096), "sliding-window attention"),
        (MixtralConfig(), "architecture 'mixtral'"),
        (Qwen3MoeConfig(), "architecture 'qwen3_moe'"),
        (GptOssConfig(), "architecture 'gpt_oss'"),
        (Gemma2Config(), "architecture 'gemma2'"),
        (Gemma3TextConfig(), "architecture 'gemma3_text'"),
        (Gemma3Config(), "architecture 'gemma3'"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "type 'dynamic'"),
    ],
    ids=lambda one: getattr(one, "model_type", ""),
)
def test_a_config_of_another_kind_is_refused_in_one_line(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        refuse_unsupported(config)
    assert "full-attention decoders (llama, mistral, qwen2, qwen3)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine_table", ["", "[engine]\nthreads = 2\n"])
def test_a_cell_computes_with_as_many_threads_as_config_says(
    engine_table: str, tmp_path: Path
) -> None:
    tiny_model("llama", is_tied=True, seed=2, positions=64).save_pretrained(tmp_path / "model")
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + engine_table)
    setup = CellSetup(
        engine="s0",
        cell=0,
        incarnation=1,
        slots=1,
        config_json="",
        link_address="",
        plane_dir="",
    )

    async def main() -> int:
        compute = ComputeThread()
        try:
            await compute.run(build_engine, load_config(path), setup, compute)
            return await compute.run(torch.get_num_threads)
        finally:
            await compute.run(torch.set_num_threads, 1)
            compute.close()

    assert asyncio.run(main()) == (2 if engine_table else 1)


@pytest.mark.parametrize("fault", ["absent", "shape", "cut"])
def test_a_folder_with_faulty_weights_is_refused_without_noise(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would draw an absent weight at random, and say so in a report."""
    tiny_model("qwen3", is_tied=True, seed=2).save_pretrained(tmp_path)
    capfd.readouterr()
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    norm = weights.pop("model.norm.weight")
    if fault == "shape":
        weights["model.norm.weight"] = norm[:5].clone()
    save_file(weights, path, metadata={"format": "pt"})
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fault == "cut" or "model.norm.weight" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_model(tmp_path / "nothing")
    assert "nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_running": 4, "num_kv_slots": 3}, "num_kv_slots 3"),
        ({"max_running": 4, "step_tokens": 3}, "step_tokens 3"),
        ({"context_tokens": 4096}, "128"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], words: str) -> None:
    compute = ComputeThread()
    with pytest.raises(ConfigError, match=words):
        TorchEngine(
            tiny_model("qwen3", is_tied=True, seed=0), TorchEngineConfig(**settings), compute
        )
    compute.close()
