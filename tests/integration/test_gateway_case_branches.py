"""Cases 6 and 7: sub-agents, titles and compaction are branches of one execution, by their kind."""

import asyncio
import json
import re

import pytest
from cases_rig import (
    ANSWER,
    EACH_PROTOCOL,
    EACH_WAY,
    Case,
    Harness,
    open_case,
    tool_calls_of,
    witness,
)
from cases_speakers import BASH, SPEAKERS, Said, Speaker

from opengyre.config.harness_profile import load_profile
from opengyre.gateway.labels import Condition, LabelRule
from opengyre.runtime.label_rules import label_rules
from opengyre.trajectory.turns import Role

CHAT, RESPONSES, MESSAGES = SPEAKERS
PROGRAMS = {"openai-chat": "qwen-code", "openai-responses": "codex", "anthropic": "claude-code"}
TOOLS = (BASH, ("agent", {"type": "object", "properties": {"prompt": {"type": "string"}}}))
CLAUDE_COMPACT = (
    "Your task is to create a detailed summary of the conversation so far, paying close attention "
    "to the user's explicit requests and your previous actions."
)
SUB_AGENT_HEADERS = {
    "openai-chat": {},
    "openai-responses": {"x-openai-subagent": "review"},
    "anthropic": {"x-claude-code-agent-id": "a-1"},
}


def act(text: str, seed: int) -> str:
    return ANSWER if text.count("assistant\n") % 2 else tool_calls_of("{}", '{"command": "ls"}')


QWEN_SUMMARISER = "You are the component that summarizes internal chat history into a structure."


def program_rules(speaker: Speaker) -> tuple[LabelRule, ...]:
    return label_rules(load_profile(PROGRAMS[speaker.name]))


def sub_agent(case: Case, speaker: Speaker, name: str) -> Harness:
    """Another system prompt, fewer tools, the headers of its program."""
    history = [Said(role="system", text=f"You help: {name}."), Said(role="user", text="Look.")]
    headers = SUB_AGENT_HEADERS[speaker.name]
    return case.harness(speaker, history=history, tools=TOOLS[:1], extra_headers=headers)


async def play(one: Harness, *, num_turns: int, stream: bool) -> None:
    for _ in range(num_turns):
        await one.turn(stream=stream)


@EACH_PROTOCOL
@EACH_WAY
def test_case_06_two_concurrent_sub_agents_are_branches_and_do_not_reset_the_main_one(
    speaker: Speaker, stream: bool
) -> None:
    async def main() -> None:
        engine = witness(act, tokens_per_s=2000)
        async with open_case({"s0": engine}, labels=program_rules(speaker)) as case:
            start = [Said(role="system", text="You act."), Said(role="user", text="Do it.")]
            one = case.harness(speaker, history=start, tools=TOOLS)
            await play(one, num_turns=2, stream=stream)
            helpers = [sub_agent(case, speaker, name) for name in ("first", "second")]
            await asyncio.gather(
                play(one, num_turns=3, stream=stream),
                *(play(helper, num_turns=3, stream=stream) for helper in helpers),
            )
            await play(one, num_turns=1, stream=stream)
            await case.close()
            paths, account = case.paths()
            assert sorted(len(path.turns) for path in paths) == [3, 3, 6]
            assert account.trained == account.sampled
            told = {turn.turn: turn for turn in case.rig.told}
            first = paths[0].turns
            assert len(first) == 6
            assert [told[name].fork_reason for name in first] == [""] * 6
            assert {told[name].role for name in first} == {"main"}
            if SUB_AGENT_HEADERS[speaker.name]:
                for path in paths[1:]:
                    assert {told[name].role for name in path.turns} == {"sub-agent"}

    asyncio.run(main())


def test_case_06_qwens_sub_agent_without_a_marker_is_a_branch_of_its_own() -> None:
    """The wire tells nothing but another system prompt and no agent tool."""

    async def main() -> None:
        async with open_case({"s0": witness(act)}, labels=program_rules(CHAT)) as case:
            one = case.harness(CHAT, tools=TOOLS)
            await play(one, num_turns=1, stream=True)
            await play(sub_agent(case, CHAT, "first"), num_turns=2, stream=True)
            await play(one, num_turns=1, stream=True)
            await case.close()
            paths, _ = case.paths()
            assert [len(path.turns) for path in paths] == [2, 2]

    asyncio.run(main())


TITLE = LabelRule(
    role="side", conditions=(Condition(text="system", pattern=re.compile("title for this")),)
)
SUMMARY = LabelRule(
    role="main-summary",
    conditions=(Condition(text="last_user", pattern=re.compile("^Summarize")),),
)


@EACH_PROTOCOL
@EACH_WAY
@pytest.mark.parametrize(
    "untrained", [(), ("side",), ("side", "main-summary")], ids=lambda one: "+".join(one) or "none"
)
def test_case_07_title_and_compaction_calls_are_labelled_and_counted_by_policy(
    speaker: Speaker, stream: bool, untrained: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(act)}, labels=(TITLE, SUMMARY)) as case:
            one = case.harness(speaker)
            await play(one, num_turns=2, stream=stream)
            title = [
                Said(role="system", text="Give a title for this."),
                Said(role="user", text="Do it."),
            ]
            await case.harness(speaker, history=title, tools=()).ask(stream=stream)
            one.history.append(Said(role="user", text="Summarize all of it."))
            reply = await one.ask(stream=stream)
            after = [Said(role="user", text=f"So far: {reply.text or 'nothing'}. Go on.")]
            await play(case.harness(speaker, history=after), num_turns=2, stream=stream)
            await case.close()
            roles = [turn.role for turn in case.rig.told]
            assert roles == ["main", "main", "side", "main-summary", "main", "main"]
            trained_roles = tuple(role for role in Role if role not in untrained)
            _, account = case.paths(trained_roles=trained_roles)
            captured = sum(turn.num_completion_tokens for turn in case.rig.told)
            excluded = sum(
                turn.num_completion_tokens for turn in case.rig.told if turn.role in untrained
            )
            assert account.sampled == captured
            assert account.trained == captured - excluded
            assert sum(account.masked.values()) + sum(account.dropped.values()) == excluded

    asyncio.run(main())


def compaction(case: Case, speaker: Speaker, history: Harness) -> tuple[Harness, bool]:
    """The call as the program of this protocol makes it (measured), and whether it is streamed."""
    one = case.harness(speaker, history=list(history.history), tools=TOOLS)
    match speaker.name:
        case "openai-chat":
            first = [Said(role="system", text=QWEN_SUMMARISER)]
            one.history = [*first, *one.history, Said(role="user", text="Now the summary.")]
            one.tools = ()
            return one, False
        case "openai-responses":
            told = json.dumps({"thread_source": "user", "request_kind": "compaction"})
            one.history.append(Said(role="user", text="Write a handoff summary."))
            one.tools = ()
            one.extra = {"tools": [], "client_metadata": {"x-codex-turn-metadata": told}}
            one.extra_headers = {"x-codex-turn-metadata": told}
        case _:
            one.history.append(Said(role="user", text=CLAUDE_COMPACT))
    return one, True


@EACH_PROTOCOL
def test_case_07_compaction_of_each_program_is_labelled_by_its_shipped_profile(
    speaker: Speaker,
) -> None:
    async def main() -> None:
        async with open_case({"s0": witness(act)}, labels=program_rules(speaker)) as case:
            start = [Said(role="system", text="You act."), Said(role="user", text="Do it.")]
            one = case.harness(speaker, history=start, tools=TOOLS)
            await play(one, num_turns=2, stream=True)
            compact, stream = compaction(case, speaker, one)
            await compact.ask(stream=stream)
            await case.close()
            roles = [turn.role for turn in case.rig.told]
            assert roles == ["main", "main", "main-summary"]

    asyncio.run(main())
