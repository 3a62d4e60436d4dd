"""From the records and the verdict of an execution to what its group compares."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from opengyre.config.load import load_config
from opengyre.config.reward import FormatPenaltyConfig, LengthPenaltyConfig, RewardConfig
from opengyre.control.facts import Outcome, VerdictGiven
from opengyre.runtime.book import Execution
from opengyre.runtime.rewards import Rewards, load_transforms, stats_of
from opengyre.seams.errors import ConfigError
from opengyre.seams.records import SegmentRef, TurnRecord
from opengyre.seams.tasks import Task, Verdict
from opengyre.trajectory.account import Reason
from opengyre.trajectory.advantages import Excess, ExcessSettings
from opengyre.trajectory.shaping import SAMPLE_STATS, ExecutionStats, NamedTransform

TASK = Task(
    name="one",
    folder=Path("/"),
    instruction="",
    workspace=None,
    tests=Path("/"),
    content_hash="",
)
LEAST = """
run = {dir = "runs", num_steps = 1}
model = {path = "model"}
tasks = [{path = "tasks"}]
"""


def turn(number: int, **fields: Any) -> TurnRecord:
    known = {
        "turn": f"e000000.t{number}",
        "execution": "e000000",
        "attempt": 0,
        "parent": "",
        "fork_reason": "",
        "role": "main",
        "num_kept_tokens": 0,
        "num_new_prompt_tokens": 5,
        "num_completion_tokens": 10,
        "spans": [],
        "finish": "stop",
        "is_committed": True,
        "ref": SegmentRef(segment=0, offset_bytes=0, crc32=0),
        "received_s": 0.0,
        "first_token_s": 0.0,
        "ended_s": 0.0,
        "held_s": 0.0,
        "num_continuations": 0,
    }
    return TurnRecord(**(known | fields))


def execution(*turns: TurnRecord, group: str | None = "g00000") -> Execution:
    return Execution(
        execution="e000000",
        task=TASK,
        group=group,
        burst=0,
        version=0,
        seed=0,
        turns=list(turns) or [turn(1)],
    )


@dataclass(frozen=True)
class Settled:
    one: Execution
    fact: VerdictGiven
    said: list[str]


def settle(
    one: Execution,
    *transforms: NamedTransform,
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    excess: ExcessSettings | None = None,
) -> Settled:
    said: list[str] = []
    rewards = Rewards(transforms, excess=excess or ExcessSettings(), say=said.append)
    fact = rewards.settle(one, outcome, Verdict(reward=reward, reason="r"))
    return Settled(one, fact, said)


def halved(reward: float, stats: ExecutionStats) -> float:
    return reward / 2


def failing(reward: float, stats: ExecutionStats) -> float:
    raise ValueError("no")


HALVED = NamedTransform(name="halved", apply=halved)
NOTHING = {"main": 0, "main-summary": 0, "sub-agent": 0, "sub-agent-summary": 0, "side": 0}
FAILING = NamedTransform(name="failing", apply=failing)


def test_the_figures_count_standing_turns_by_role() -> None:
    stats = stats_of(
        [
            turn(1, num_calls=2, num_watched_calls=1),
            turn(2, role="side", num_completion_tokens=3, finish="length"),
            turn(3, num_kept_tokens=15, num_malformed_calls=1, finish="length"),
        ],
        outcome=Outcome.FAILED,
    )
    assert stats == ExecutionStats(
        outcome="failed",
        turns_by_role={**NOTHING, "main": 2, "side": 1},
        tokens_by_role={**NOTHING, "main": 20, "side": 3},
        longest_context_tokens=30,
        num_calls=2,
        num_malformed_calls=1,
        num_watched_calls=1,
        num_truncated_turns=2,
        last_finish="length",
    )


def test_abandoned_attempts_count_nowhere_and_the_last_committed_one_stands() -> None:
    stats = stats_of(
        [
            turn(1, num_completion_tokens=7),
            turn(1, attempt=1, num_completion_tokens=4),
            turn(1, attempt=2, num_completion_tokens=100, is_committed=False),
            turn(2, num_completion_tokens=100, is_committed=False, finish="length"),
        ],
        outcome=Outcome.COMPLETED,
    )
    assert (stats.num_turns, stats.num_sampled_tokens) == (1, 4)
    assert stats.last_finish == "stop"


def test_the_last_main_turn_is_the_last_that_began_not_the_last_that_ended() -> None:
    turns = [turn(10, finish="stop"), turn(9, finish="length"), turn(11, role="side")]
    assert stats_of(turns, outcome=Outcome.COMPLETED).last_finish == "stop"


def test_an_execution_without_turns_has_figures() -> None:
    stats = stats_of([], outcome=Outcome.TIMED_OUT)
    assert (stats.num_turns, stats.longest_context_tokens, stats.last_finish) == (0, 0, "")
    assert stats.is_truncated


def test_the_raw_and_the_shaped_reward_are_both_told() -> None:
    settled = settle(execution(), HALVED, HALVED)
    assert (settled.fact.reward, settled.fact.shaped, settled.fact.value) == (1.0, 0.25, 0.25)
    assert (settled.one.reward, settled.one.shaped, settled.one.value) == (1.0, 0.25, 0.25)
    assert settled.fact.num_trainable_tokens == 10


def test_without_transforms_the_reward_is_compared_as_it_is() -> None:
    settled = settle(execution())
    assert (settled.fact.shaped, settled.fact.value, settled.one.value) == (None, 1.0, 1.0)


def test_an_evaluation_keeps_its_raw_reward_whatever_is_set() -> None:
    drop = ExcessSettings(truncated=Excess.DROP)
    one = execution(group=None)
    settled = settle(one, FAILING, outcome=Outcome.TIMED_OUT, excess=drop)
    assert (settled.fact.reward, settled.fact.shaped, settled.fact.exclusion) == (1.0, None, "")
    assert one.has_verdict
    assert settled.said == []


def test_no_verdict_is_not_shaped() -> None:
    settled = settle(execution(), HALVED, reward=None)
    assert (settled.fact.reward, settled.fact.shaped, settled.fact.exclusion) == (None, None, "")
    assert settled.one.value is None


def test_a_transform_that_fails_excludes_the_member_and_is_told_once() -> None:
    said: list[str] = []
    rewards = Rewards([FAILING], excess=ExcessSettings(), say=said.append)
    verdict = Verdict(reward=1.0, reason="")
    one, other = execution(), replace(execution(), execution="e000001")
    fact = rewards.settle(one, Outcome.COMPLETED, verdict)
    rewards.settle(other, Outcome.COMPLETED, verdict)
    assert fact.exclusion == "no_shaped_reward: failing raised ValueError: no"
    assert (fact.reward, fact.shaped, fact.value) == (1.0, None, None)
    assert (one.value, one.exclusion) == (None, Reason.NO_SHAPED_REWARD)
    assert fact.num_trainable_tokens == 0
    assert len(said) == 1
    assert said[0].startswith("e000000 ")


def test_masking_keeps_the_reward_in_the_baseline_and_trains_nothing() -> None:
    mask = ExcessSettings(truncated=Excess.MASK)
    settled = settle(execution(turn(1, finish="length")), HALVED, excess=mask)
    assert (settled.one.masked, settled.one.value) == (Reason.TRUNCATED, 0.5)
    assert (settled.fact.exclusion, settled.fact.num_trainable_tokens) == ("", 0)


def test_dropping_takes_the_member_out_of_its_group() -> None:
    drop = ExcessSettings(overlong=Excess.DROP, overlong_tokens=9)
    settled = settle(execution(), HALVED, excess=drop)
    assert (settled.fact.exclusion, settled.fact.reward, settled.fact.value) == (
        "overlong",
        1.0,
        None,
    )
    assert (settled.one.exclusion, settled.one.value) == (Reason.OVERLONG, None)


def test_the_built_in_transforms_take_their_settings_from_the_config() -> None:
    config = RewardConfig(
        transforms=("format_penalty", "length_penalty"),
        length_penalty=LengthPenaltyConfig(max_tokens=310, buffer_tokens=100, weight=0.5),
        format_penalty=FormatPenaltyConfig(weight=0.1),
    )
    formed, short = load_transforms(config)
    assert formed.apply(1.0, SAMPLE_STATS) == pytest.approx(1.0 - 0.1 / 2)
    assert short.apply(1.0, SAMPLE_STATS) == pytest.approx(0.5)


def refused(tmp_path: Path, text: str, target: str = "shape") -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_transforms(RewardConfig(transforms=(f"{path}:{target}",)))
    words = str(error.value)
    assert words.startswith("reward.transforms")
    assert str(path) in words
    assert "\n" not in words
    return words


def test_a_name_that_is_not_in_the_file_is_refused_at_the_start(tmp_path: Path) -> None:
    assert "has no function shaep" in refused(tmp_path, "def shape(r, s): return r", "shaep")
    assert "has no function SHAPE" in refused(tmp_path, "SHAPE = 3", "SHAPE")


@pytest.mark.parametrize("text", ["def shape(", "import nowhere_at_all", "shape = undefined", ""])
def test_a_file_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def shape(reward): return reward", "raised TypeError"),
        ("def shape(r, stats): return r - stats.tokens", "raised AttributeError"),
        ("def shape(r, stats): return None", "answered None (NoneType), not a finite number"),
    ],
)
def test_a_function_that_fails_on_a_sample_is_refused_at_the_start(
    tmp_path: Path, text: str, words: str
) -> None:
    assert words in refused(tmp_path, text)


def test_two_functions_of_one_file_share_the_file_and_other_files_of_its_name_stay_apart(
    tmp_path: Path,
) -> None:
    text = "calls = []\ndef one(r, s):\n    calls.append(1)\n    return r + {0}\n"
    names = []
    for number, folder in enumerate(("a", "b")):
        path = tmp_path / folder / "shapes.py"
        path.parent.mkdir()
        path.write_text(text.format(number + 1) + "def many(r, s):\n    return len(calls)\n")
        names += [f"{path}:one", f"{path}:many"]
    one, many, other, others = load_transforms(RewardConfig(transforms=tuple(names)))
    assert (one.apply(0.0, SAMPLE_STATS), other.apply(0.0, SAMPLE_STATS)) == (1.0, 2.0)
    assert (many.apply(0.0, SAMPLE_STATS), others.apply(0.0, SAMPLE_STATS)) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('reward.transforms=["length_penalt"]', "length_penalty, format_penalty, file.py:function"),
        ('reward.transforms=["length_penalty"]', "reward.length_penalty is missing"),
        (
            "reward.length_penalty={max_tokens=9, buffer_tokens=3}",
            "reward.transforms = []: expected length_penalty among them",
        ),
        (
            'reward={transforms=["length_penalty"], '
            "length_penalty={max_tokens=9, buffer_tokens=10}}",
            "reward.length_penalty.buffer_tokens = 10: expected at most",
        ),
        ("training.overlong=mask", "training.overlong_tokens = 0: expected a bound"),
        ("training.overlong_tokens=9", "training.overlong_tokens = 9: expected a bound"),
        ("training.truncated=skip", "training.truncated"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_words(
    tmp_path: Path, override: str, words: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(LEAST)
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert words in str(error.value)


def test_a_transforms_file_is_found_from_the_folder_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(LEAST)
    config = load_config(path, ['reward.transforms=["mine.py:f", "a.b:g", "format_penalty"]'])
    assert config.reward.transforms == (f"{tmp_path / 'mine.py'}:f", "a.b:g", "format_penalty")
