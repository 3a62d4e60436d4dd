"""What has a verdict without being graded, and what a config may say of it."""

from pathlib import Path

import pytest

from opengyre.config.grading import GradingConfig, grading_problems
from opengyre.config.load import load_config
from opengyre.runtime.grading import EndingRules, ending_rules
from opengyre.seams.errors import ConfigError
from opengyre.seams.harness import Ending, LaunchResult
from opengyre.tasks.confined import GradingError, checked_reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripted.toml"


def ended(ending: Ending) -> LaunchResult:
    return LaunchResult(
        ending=ending,
        exit_code=0 if ending is Ending.EXITED else None,
        signal=None,
        output_tail="",
        num_output_bytes=0,
        wall_s=0.1,
        reason="so it ended",
    )


UNGRADED = (Ending.CANCELLED, Ending.NOT_STARTED, Ending.LOST)


@pytest.mark.parametrize("ending", list(Ending))
def test_only_what_was_cancelled_or_lost_through_us_is_not_graded(ending: Ending) -> None:
    verdict = EndingRules().ungraded(ended(ending), is_overdue=False)
    if ending in UNGRADED:
        assert verdict is not None
        assert verdict.reward is None
    else:
        assert verdict is None


@pytest.mark.parametrize("ending", list(Ending))
def test_a_placeholder_is_given_only_to_what_never_started(ending: Ending) -> None:
    verdict = EndingRules(placeholder_reward=0.0).ungraded(ended(ending), is_overdue=False)
    if ending is Ending.NOT_STARTED:
        assert verdict is not None
        assert verdict.reward == 0.0
        assert "placeholder" in verdict.reason
        assert "so it ended" in verdict.reason
    else:
        assert verdict is None or verdict.reward is None


@pytest.mark.parametrize("is_graded", [False, True])
def test_what_took_too_long_in_all_is_timed_out_and_discarded_unless_config_grades_it(
    is_graded: bool,
) -> None:
    rules = EndingRules(overall_s=30.0, is_overdue_graded=is_graded)
    result = rules.overdue(ended(Ending.CANCELLED))
    assert result.is_timed_out
    verdict = rules.ungraded(result, is_overdue=True)
    if is_graded:
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.reward is None
        assert "30.0 s in all" in verdict.reason


def test_the_rules_come_from_the_config() -> None:
    config = load_config(
        EXAMPLE,
        [
            "harness.overall_timeout_s=900",
            'harness.overall_timeout_verdict="graded"',
            "grading.placeholder_reward=0.0",
        ],
    )
    assert ending_rules(config) == EndingRules(
        overall_s=900.0, is_overdue_graded=True, placeholder_reward=0.0
    )
    assert ending_rules(load_config(EXAMPLE)) == EndingRules()


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (['grading.kind="command"'], "grading.command"),
        (['grading.command=["true"]'], "grading.command"),
        (['grading.kind="callable"'], "grading.function"),
        (['grading.function="a.py:f"'], "grading.function"),
        (["grading.placeholder_reward=2.0"], "grading.placeholder_reward"),
        (["grading.num_attempts=0"], "grading.num_attempts"),
        (['grading.kind="jury"'], "grading.kind"),
        (["grading.exit_rewards={0 = 1.0, 256 = 0.0}"], "grading.exit_rewards"),
        (["grading.exit_rewards={0 = 1.5}"], "grading.exit_rewards"),
        (["grading.exit_rewards={}"], "grading.exit_rewards"),
        (["harness.overall_timeout_s=0"], "harness.overall_timeout_s"),
        (['harness.overall_timeout_verdict="zero"'], "harness.overall_timeout_verdict"),
    ],
)
def test_a_wrong_key_is_refused_by_its_name(sets: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(EXAMPLE, sets)


def test_codes_of_a_command_are_read_as_numbers() -> None:
    config = load_config(
        EXAMPLE,
        [
            'grading.kind="command"',
            'grading.command=["make", "-C", "{workspace}"]',
            "grading.exit_rewards={0 = 1.0, 2 = 0.5}",
        ],
    )
    assert config.grading.exit_rewards == {0: 1.0, 2: 0.5}
    assert grading_problems(config.grading) == []
    assert grading_problems(GradingConfig()) == []


@pytest.mark.parametrize("raw", [10**400, -(10**400), 1.5, -0.1, float("nan"), float("inf")])
def test_a_number_that_is_no_reward_is_refused_whatever_its_size(raw: float) -> None:
    with pytest.raises(GradingError, match=r"reward\.json: the reward is out of range"):
        checked_reward(raw, "reward.json")
