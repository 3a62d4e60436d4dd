"""All of it at once, by seed: three protocols, moves, deaths, publications, leaves, retries.

Whatever happens, each committed answer is what its model says to its prompt, token for token under
the version that sampled it, each harness has one unbroken branch, and no request was made twice.
"""

import asyncio
import json
import random
from typing import Any

import pytest
from cases_rig import Case, Harness, Witness, open_case, text_of, witness
from cases_speakers import SPEAKERS, Answered, Results, Said
from test_gateway_case_recording import odd_answer

from opengyre.engines.scripted import pseudo_logprob
from opengyre.seams.records import TokenRecord

NUM_TURNS = 6
ENGINES = ("s0", "s1", "c1")


class Director:
    """Makes trouble until it is told to stop; what it breaks it mends."""

    def __init__(self, case: Case, dice: random.Random) -> None:
        self._case = case
        self._dice = dice
        self._incarnations = dict.fromkeys(ENGINES, 0)
        self._versions = dict.fromkeys(ENGINES, 0)
        self.is_over = False
        self.counts = dict.fromkeys(("move", "death", "publication"), 0)

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self._dice.uniform(0.0, 0.05))
            what = self._dice.choice(["move", "move", "death", "publication"])
            name = self._dice.choice(ENGINES)
            self.counts[what] += 1
            match what:
                case "move":
                    await self._move()
                case "death":
                    await self._die(name)
                case _:
                    await self._publish(name)

    async def _move(self) -> None:
        """An execution leaves its engine, as when a cell leaves rollout: route, freeze, go on."""
        execution = self._dice.choice(self._case.executions)
        self._case.rig.gateway.set_routes({execution: self._dice.choice(ENGINES)})
        source: Witness = self._case.engines[self._dice.choice(ENGINES)]
        mine = [one.request_id for one in source.requests if one.execution == execution]
        for request_id in mine[-2:]:
            await source.freeze(request_id)

    async def _die(self, name: str) -> None:
        gateway, engine = self._case.rig.gateway, self._case.engines[name]
        gateway.engine_lost(name)
        await engine.inner.freeze_all()
        await asyncio.sleep(self._dice.uniform(0.0, 0.05))
        self._incarnations[name] += 1
        gateway.connect_engine(name, engine, self._incarnations[name])

    async def _publish(self, name: str) -> None:
        gateway, inner = self._case.rig.gateway, self._case.engines[name].inner
        self._versions[name] += 1
        gateway.close_door(name)
        await inner.freeze_all()
        await inner.pause()
        await inner.begin_update(self._versions[name])
        await inner.commit(self._versions[name])
        await inner.resume()
        gateway.open_door(name)


async def play(one: Harness, dice: random.Random) -> int:
    """Turns with a client that at times leaves and tries again; how often it left."""
    num_left = 0
    for _ in range(NUM_TURNS):
        body = one.body(stream=dice.random() < 0.7)
        if body["stream"] and dice.random() < 0.4:
            num_left += await left(one, body, dice)
        reply = await one.send(shuffled(body, dice))
        one.history.append(Answered(form=one.speaker.as_harness(reply.sent_back)))
        pairs = [(call.call_id, f"result of {k}") for k, call in enumerate(reply.calls)]
        dice.shuffle(pairs)
        one.history.append(Results(pairs=tuple(pairs)))
    return num_left


async def left(one: Harness, body: Any, dice: random.Random) -> bool:
    """True if its client went away before the answer was whole."""
    num_wanted, num_parts = dice.randrange(1, 12), 0
    one.num_requests += 1
    call = one.client.stream("POST", one.url, headers=one.headers, json=body)
    async with call as answer:
        async for _ in answer.aiter_raw():
            num_parts += 1
            if num_parts == num_wanted:
                return True
    return False


def shuffled(body: Any, dice: random.Random) -> Any:
    keys = list(body)
    dice.shuffle(keys)
    return json.loads(json.dumps({key: body[key] for key in keys}))


def check_committed(case: Case, record: TokenRecord, seed: int) -> None:
    prompt = case.full_prompt(record)
    wanted = odd_answer(text_of(prompt), 0) + "<|im_end|>"
    assert text_of(record.completion_ids) == wanted, record.header
    versions = [
        span.policy_version for span in record.header.spans for _ in range(span.start, span.end)
    ]
    assert record.logprobs == [
        pseudo_logprob(seed, len(prompt) + k, version) for k, version in enumerate(versions)
    ]


def branch_of(committed: list[TokenRecord]) -> list[TokenRecord]:
    """The last turn and those before it, each of which it extends in whole."""
    by_turn = {record.header.turn: record for record in committed}
    branch = [committed[-1]]
    while parent := by_turn.get(branch[-1].header.parent):
        if branch[-1].header.fork_reason:
            break
        num_before = parent.header.num_kept_tokens + parent.header.num_new_prompt_tokens
        assert branch[-1].header.num_kept_tokens == num_before + len(parent.completion_ids)
        branch.append(parent)
    return branch


def seed_of(case: Case, record: TokenRecord) -> int:
    name = f"{record.header.turn}.a{record.header.attempt}."
    requests = [request for one in case.engines.values() for request in one.requests]
    (seed,) = {one.seed for one in requests if one.request_id.startswith(name)}
    return seed


def run_seed(seed: int) -> None:
    async def main() -> None:
        dice = random.Random(seed)
        engines = {name: witness(odd_answer, tokens_per_s=600, max_running=4) for name in ENGINES}
        async with open_case(engines, hold_max_s=30.0) as case:
            harnesses = [
                case.harness(
                    speaker,
                    history=[Said(role="user", text=f"Task {k} of {speaker.name}.")],
                    **case.open(f"e{k}0000{n}", dice.choice(ENGINES)),
                )
                for n, speaker in enumerate(SPEAKERS)
                for k in (1, 2)
            ]
            await case.harness(SPEAKERS[0]).ask(stream=True)
            director = Director(case, dice)
            trouble = asyncio.create_task(director.run())
            plays = [play(one, random.Random(f"{seed}/{k}")) for k, one in enumerate(harnesses)]
            nums_left = await asyncio.gather(*plays)
            director.is_over = True
            await trouble
            await case.close()
            assert all(director.counts.values())
            for one, num_left in zip(harnesses, nums_left, strict=True):
                check_execution(case, one, num_left)

    asyncio.run(main())


def check_execution(case: Case, one: Harness, num_left: int) -> None:
    records = case.records(one.execution)
    committed = [record for record in records if record.header.is_committed]
    for record in committed:
        check_committed(case, record, seed_of(case, record))
    _, account = case.paths(one.execution)
    assert len(branch_of(committed)) == NUM_TURNS
    assert account.trained == sum(len(record.completion_ids) for record in committed)
    assert NUM_TURNS <= len(committed) <= one.num_requests
    assert len(records) == one.num_requests
    assert len(records) - len(committed) <= num_left


@pytest.mark.parametrize("seed", [1, 2])
def test_cases_together_leave_exact_records_and_one_branch_for_each_harness(seed: int) -> None:
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_seeds_of_all_cases_together_leave_exact_records() -> None:
    for seed in range(3, 40):
        run_seed(seed)
