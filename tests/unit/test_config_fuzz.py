"""Whatever stands at a key, the answer is a config or a refusal in words."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opengyre.config.keys import known_keys
from opengyre.config.load import load_config, parse_resolved, resolved_json
from opengyre.config.root import RunConfig, find_problems
from opengyre.seams.errors import ConfigError

LEAST = '[run]\ndir="r"\nnum_steps=1\n[model]\npath="m"\n[[tasks]]\npath="t"\n'
KEYS = [key.replace("[]", "[0]") for key in known_keys(RunConfig)]
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["2024-01-01", "[", "[[1]]", "{a=1}", "embedded", "a.py:f", ":", "~", "\0"]),
)


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(key=st.sampled_from([*KEYS, "run", "tasks", "tasks[0]", "eval", "x"]), value=SCALARS)
def test_any_value_at_any_key_is_taken_or_refused_in_words(
    tmp_path: Path, key: str, value: Any
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(LEAST)
    config, words = answer(path, f"{key}={spelled(value)}")
    if config is None:
        assert key.split("[")[0].split(".")[0] in words
    else:
        assert find_problems(config) == []
        assert parse_resolved(resolved_json(config)) == config


def answer(path: Path, override: str) -> tuple[RunConfig | None, str]:
    try:
        return load_config(path, [override]), ""
    except ConfigError as refused:
        return None, str(refused)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', '{"run": []}'])
def test_json_that_is_no_config_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: "):
        parse_resolved(text)
