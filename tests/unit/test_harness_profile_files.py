"""Profile files: what is in force, what is refused and in which words, what a label means."""

from pathlib import Path

import pytest

from opengyre.config.base import SHIPPED_HARNESSES
from opengyre.config.harness_profile import load_profile
from opengyre.config.load import load_config
from opengyre.gateway.labels import Evidence, role_of
from opengyre.gateway.request import Message, Request, Role
from opengyre.runtime.label_rules import label_rules
from opengyre.seams.errors import ConfigError


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    return str(caught.value).removeprefix(f"{path}: ")


def test_every_shipped_profile_loads_under_its_own_name() -> None:
    assert (
        *("claude-code", "codex", "command"),
        *("gyre-agent", "gyre-agent-compact", "gyre-agent-sub-agent"),
        *("mini-swe-agent", "qwen-code"),
    ) == SHIPPED_HARNESSES
    for name in SHIPPED_HARNESSES:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.about
        assert bool(profile.launch.program) == bool(profile.install)


def test_a_users_profile_is_a_file_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[launch]\nargv = ["/opt/agent", "{instruction_file}"]\n')
    profile = load_profile(str(path))
    assert profile.name == "mine"
    assert profile.launch.argv == ("/opt/agent", "{instruction_file}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[launch]\nargs = ["a"]', "launch.args: unknown key; did you mean launch.argv?"),
        ('[launch]\nargv = ["{modle}"]', 'launch.argv[0] = "{modle}": expected one of {instruc'),
        ('[launch]\nenv = {A = "{key}"}', 'launch.env.A = "{key}": expected one of {instruction'),
        ('[launch]\nargv = ["{program}"]', "expected launch.program beside {program}"),
        ('[launch]\nprogram = "/a/b"', 'launch.program = "/a/b": expected letters'),
        ('[launch]\nreadable = ["a"]', 'launch.readable[0] = "a": expected an absolute path'),
        (
            '[[launch.files]]\npath = "../x"\ntext = ""',
            'launch.files[0].path = "../x": expected a path below the home',
        ),
        (
            '[[labels]]\nrole = "main"\nall = []',
            "labels[0].all = []: expected at least 1 of them",
        ),
        (
            '[[labels]]\nrole = "boss"\nall = [{header = "a"}]',
            "labels[0].role = \"boss\": expected 'main'",
        ),
        (
            '[[labels]]\nrole = "main"\nall = [{header = "a", field = "b"}]',
            "expected exactly one of header, field, text",
        ),
        (
            '[[labels]]\nrole = "main"\nall = [{header = "a", matches = "b", is_empty = true}]',
            "expected at most one of matches, is_empty",
        ),
        (
            '[[labels]]\nrole = "main"\nall = [{header = "a", matches = "("}]',
            'labels[0].all[0].matches = "(": expected a regular expression',
        ),
    ],
)
def test_a_refusal_names_the_key_and_what_was_expected(
    tmp_path: Path, text: str, words: str
) -> None:
    assert words in refusal(tmp_path, text)


def test_unknown_names_and_missing_files_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cursor: no such harness; expected one of claude-code"):
        load_profile("cursor")
    with pytest.raises(ConfigError, match="no such config file"):
        load_profile(str(tmp_path / "none.toml"))


def role(profile: str, *said: tuple[Role, str], body: dict | None = None, **headers: str) -> str:
    """The role of a call by a shipped profile; `_` in a header's name stands for `-`."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    messages = tuple(Message(role=who, text=text) for who, text in said)
    evidence = Evidence(
        header=lambda name: sent.get(name, ""),
        body={"tools": [{"name": "agent"}]} if body is None else body,
        request=Request(model="m", messages=messages),
    )
    return role_of(evidence, label_rules(load_profile(profile)))


SUMMARY = (Role.USER, "CRITICAL.\n\nYour task is to create a detailed summary of the conversation")
TASK = (Role.USER, "Fix it.")
COMPACTION = '{"turn_id":"t","request_kind":"compaction"}'
TURN = '{"turn_id":"t","request_kind":"turn"}'
QWEN = (Role.SYSTEM, "You are Qwen Code, an agent.")
QWEN_SUB = (Role.SYSTEM, "You are a general-purpose agent.")
QWEN_SUMMARY = (
    Role.SYSTEM,
    "You are the component that summarizes internal chat history into a given structure.",
)
SHELL = {"tools": [{"function": {"name": "run_shell_command"}}]}


def test_claude_code_tells_its_calls_by_a_header_and_by_what_its_user_says_last() -> None:
    assert role("claude-code", TASK) == "main"
    assert role("claude-code", TASK, SUMMARY) == "main-summary"
    assert role("claude-code", SUMMARY, TASK) == "main"
    assert role("claude-code", TASK, x_claude_code_agent_id="a1") == "sub-agent"
    assert role("claude-code", SUMMARY, x_claude_code_agent_id="a1") == "sub-agent-summary"
    assert role("claude-code", TASK, body={}) == "side"


def test_codex_tells_its_calls_by_headers() -> None:
    assert role("codex", TASK, x_codex_turn_metadata=TURN) == "main"
    assert role("codex", TASK, x_codex_turn_metadata=COMPACTION) == "main-summary"
    spawned = {"x_openai_subagent": "collab_spawn"}
    assert role("codex", TASK, x_codex_turn_metadata=TURN, **spawned) == "sub-agent"
    told = role("codex", TASK, x_codex_turn_metadata=COMPACTION, **spawned)
    assert told == "sub-agent-summary"


def test_qwen_code_tells_its_calls_by_system_text_and_tools() -> None:
    assert role("qwen-code", QWEN, TASK) == "main"
    assert role("qwen-code", QWEN, TASK, body=SHELL) == "main"
    assert role("qwen-code", QWEN_SUB, TASK, body=SHELL) == "sub-agent"
    assert role("qwen-code", QWEN_SUB, TASK) == "main"
    assert role("qwen-code", QWEN_SUMMARY, TASK, body={}) == "main-summary"
    assert role("qwen-code", QWEN, TASK, body={"tools": []}) == "side"


def test_the_bundled_agent_says_whose_a_call_is() -> None:
    assert role("gyre-agent-compact", TASK, x_gyre_call="main") == "main"
    assert role("gyre-agent-compact", TASK, x_gyre_call="main-summary") == "main-summary"
    for told in ("main", "sub-agent", "sub-agent-summary"):
        assert role("gyre-agent-sub-agent", TASK, x_gyre_call=told) == told


CONFIG = '[run]\ndir = "r"\nnum_steps = 1\n[model]\npath = "m"\n[[tasks]]\npath = "t"\n'


def test_a_config_names_a_shipped_profile_or_a_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    assert load_config(path).harness.profile == "gyre-agent"
    assert load_config(path, ["harness.profile=codex"]).harness.profile == "codex"
    own = load_config(path, ['harness.profile="agents/mine.toml"']).harness.profile
    assert own == str(tmp_path / "agents" / "mine.toml")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["harness.profile=cursor"])
    assert str(caught.value).removeprefix(f"{path}: ") == (
        'harness.profile = "cursor": expected one of claude-code, codex, command, gyre-agent, '
        "gyre-agent-compact, gyre-agent-sub-agent, mini-swe-agent, qwen-code, "
        "or the path of a .toml file"
    )
