"""Case 18: a publication in the middle of a turn, in thinking, in text and in tool arguments."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    EACH_WAY,
    SAID,
    Case,
    Witness,
    num_tokens_of,
    open_case,
    witness,
)
from cases_speakers import Said, Speaker
from gateway_rig import MODEL

from opengyre.engines.compute import ComputeThread
from opengyre.engines.scripted import pseudo_logprob
from opengyre.engines.torch_engine.engine import TorchEngine, TorchEngineConfig
from opengyre.engines.torch_engine.model import load_model
from opengyre.gateway.gateway import SamplingDefaults
from opengyre.seams.engine import GenerateRequest
from opengyre.seams.records import TokenRecord

TEMPERATURE = 3.0
"""So high that the answers do not end early."""


async def publish(
    case: Case, engine_id: str, version: int, weights: dict[str, Any] | None = None
) -> None:
    """The order of DESIGN.md 2.5."""
    gateway, engine = case.rig.gateway, case.engines[engine_id].inner
    gateway.close_door(engine_id)
    await engine.freeze_all()
    await engine.pause()
    await engine.begin_update(version)
    for name, tensor in (weights or {}).items():
        await engine.push(name, tensor)
    await engine.commit(version)
    await engine.resume()
    gateway.open_door(engine_id)


@EACH_PROTOCOL
@EACH_WAY
def test_case_18_a_publication_after_any_token_is_one_request_and_one_stream_of_two_versions(
    speaker: Speaker, stream: bool
) -> None:
    """One execution for each token: in thinking, in text, in tool arguments, before the end."""

    async def main() -> None:
        async with open_case({"s0": witness(lambda text, seed: ANSWER)}) as case:
            await case.harness(speaker).ask(stream=stream)
            await asyncio.gather(
                *(
                    publish_after(num_tokens, case, speaker, stream=stream)
                    for num_tokens in range(1, num_tokens_of(ANSWER))
                )
            )

    asyncio.run(main())


async def publish_after(num_before: int, case: Case, speaker: Speaker, *, stream: bool) -> None:
    name, num_tokens = f"c{num_before}", num_tokens_of(ANSWER)
    engine = case.engines[name] = witness(lambda text, seed: ANSWER, cut_at=num_before)
    case.rig.gateway.connect_engine(name, engine, 0)
    one = case.harness(speaker, **case.open(f"e3{num_before:05d}", name))
    cut = asyncio.Event()

    def freeze() -> None:
        case.rig.gateway.close_door(name)
        cut.set()

    engine.on_cut = freeze
    call = asyncio.create_task(one.ask(stream=stream))
    await cut.wait()
    await publish(case, name, 1)
    assert (await call).said == SAID
    assert one.num_requests == 1
    (record,) = case.records(one.execution)
    spans = [(s.start, s.end, s.policy_version) for s in record.header.spans]
    assert spans == [(0, num_before, 0), (num_before, num_tokens, 1)]
    assert record.logprobs == expected_logprobs(record, case.full_prompt(record), engine)
    (path,), _ = case.paths(one.execution)
    assert path.versions[-num_tokens:] == [0] * num_before + [1] * (num_tokens - num_before)


def expected_logprobs(record: TokenRecord, prompt: list[int], engine: Witness) -> list[float]:
    seed = next(r.seed for r in engine.requests if r.execution == record.header.execution)
    versions = [
        span.policy_version for span in record.header.spans for _ in range(span.start, span.end)
    ]
    return [pseudo_logprob(seed, len(prompt) + k, version) for k, version in enumerate(versions)]


@EACH_PROTOCOL
def test_case_18_three_publications_in_one_turn_are_four_versions(speaker: Speaker) -> None:
    async def main() -> None:
        engine = witness(lambda text, seed: ANSWER)
        async with open_case({"s0": engine}) as case:
            one = case.harness(speaker)
            call = asyncio.create_task(one.ask(stream=True))
            for version, wanted in ((1, 5), (2, 20), (3, 40)):
                await engine.has_given(wanted)
                await publish(case, "s0", version)
            assert (await call).said == SAID
            await case.close()
            (record,) = case.records()
            versions = [span.policy_version for span in record.header.spans]
            assert versions == [0, 1, 2, 3]

    asyncio.run(main())


class TorchWitness(Witness):
    """The embedded engine with what it was asked and gave."""

    def __init__(self, inner: TorchEngine) -> None:
        super().__init__(inner)  # type: ignore[arg-type]


@asynccontextmanager
async def torch_case(model: Any) -> AsyncIterator[Case]:
    compute = ComputeThread(on_start=lambda: torch.set_num_threads(1))
    settings = TorchEngineConfig(max_running=8, context_tokens=512, step_tokens=256)
    engine = TorchEngine(model, settings, compute)
    defaults = SamplingDefaults(max_new_tokens=64, temperature=TEMPERATURE)
    try:
        async with open_case(
            {"s0": TorchWitness(engine)}, max_context_tokens=512, defaults=defaults
        ) as case:
            yield case
    finally:
        await engine.pause()
        compute.close()


def logprobs_of(model: Any, request: GenerateRequest, ids: list[int]) -> list[float]:
    """Of a forward without any cache, all of the prompt and the answer at once."""
    with torch.inference_mode():
        logits = model(torch.tensor([request.prompt_ids + ids])).logits[0].float() / TEMPERATURE
    rows = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    values: list[float] = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return values


def shake(model: Any) -> None:
    """Weights of another version."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)


@EACH_PROTOCOL
@pytest.mark.parametrize("num_tokens", [3, 24])
def test_case_18_logprobs_equal_a_fresh_recompute_under_the_version_of_each_span(
    speaker: Speaker, num_tokens: int
) -> None:
    """The embedded engine on the shipped model; several turns, so that there is KV to misuse."""

    async def main() -> None:
        model, old, new = load_model(MODEL), load_model(MODEL), load_model(MODEL)
        shake(new)
        weights = new.state_dict()
        async with torch_case(model) as case:
            engine = case.engines["s0"]
            one = case.harness(speaker, history=[Said(role="user", text="Count the files.")])
            await one.turn(stream=True)
            call = asyncio.create_task(one.turn(stream=True))
            await engine.has_given(engine.num_given + num_tokens)
            await publish(case, "s0", 1, weights)
            await call
            await one.turn(stream=True)
            assert one.num_requests == 3
            await case.close()
            whole, split, after = case.records()
            assert [span.policy_version for span in split.header.spans] == [0, 1]
            assert {span.policy_version for span in after.header.spans} == {1}
            assert {span.policy_version for span in whole.header.spans} == {0}
            for record in (whole, split, after):
                check_logprobs(case, record, (old, new))

    asyncio.run(main())


def check_logprobs(case: Case, record: TokenRecord, models: tuple[Any, Any]) -> None:
    prompt = case.full_prompt(record)
    asked = GenerateRequest(
        request_id="", execution="", prompt_ids=prompt, max_new_tokens=1, temperature=1.0
    )
    per_version = [logprobs_of(model, asked, record.completion_ids) for model in models]
    differ = max(abs(a - b) for a, b in zip(*per_version, strict=True))
    assert differ > 1e-2, "the two versions cannot be told apart"
    for span in record.header.spans:
        expected = per_version[span.policy_version][span.start : span.end]
        assert record.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-4)
