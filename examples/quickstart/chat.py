"""Turns quickstart conversations into token rows, exactly as a gateway will see them.

Owns the tokenizer wrapper that `renderers` needs, the renderer's settings, and conversations that
grow by bridging (sampled tokens are never encoded again). It must not know tasks or models.

Invariant: a row's prefix up to any agent turn equals the prompt a gateway builds for that turn
from gyre-agent's messages.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from opengyre.harness.gyre_agent import TOOLS

END_OF_TURN = "<|im_end|>"
UNKNOWN = "<|endoftext|>"


class RendererTokenizer:
    """A `tokenizers.Tokenizer` in the shape `renderers` asks for; encodings are cached."""

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        self.name_or_path = name
        self.eos_token_id = tokenizer.token_to_id(END_OF_TURN)
        self.unk_token_id: int | None = None
        self._tokenizer = tokenizer
        self._encode = lru_cache(maxsize=65_536)(self._encode_once)

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(self._encode(text))

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def load_tokenizer(model_folder: Path) -> RendererTokenizer:
    path = model_folder / "tokenizer.json"
    return RendererTokenizer(Tokenizer.from_file(str(path)), name=str(model_folder))


def make_renderer(tokenizer: RendererTokenizer) -> Qwen3Renderer:
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def call_text(command: str) -> str:
    """What the agent writes to run `command`."""
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


class Conversation:
    """The tokens of one play: a prompt, then by turns the agent's tokens and tool results."""

    def __init__(self, renderer: Qwen3Renderer, tokenizer: RendererTokenizer, instruction: str):
        messages = [{"role": "user", "content": instruction}]
        self._renderer = renderer
        self._tokenizer = tokenizer
        self.prompt_ids: list[int] = renderer.render_ids(
            messages, tools=TOOLS, add_generation_prompt=True
        )
        self.is_sampled: list[bool] = [False] * len(self.prompt_ids)
        self._completion_ids: list[int] = []

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self._completion_ids

    def write(self, text: str) -> None:
        """Add an agent turn given as text, closed by the end-of-turn token."""
        self.add_completion([*self._tokenizer.encode(text), self._tokenizer.eos_token_id])

    def add_completion(self, completion_ids: list[int]) -> None:
        self._completion_ids = completion_ids

    def command(self) -> str | None:
        """The bash command of the agent turn just added; None if it ends the conversation."""
        parsed = self._renderer.parse_response(self._completion_ids)
        for call in parsed.tool_calls:
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            if call.name == "bash" and isinstance(arguments.get("command"), str):
                return str(arguments["command"])
        return None

    def answer(self, output: str) -> None:
        """Add the tool's output and open the next agent turn."""
        bridged = self._renderer.bridge_to_next_turn(
            self.prompt_ids,
            self._completion_ids,
            [{"role": "tool", "tool_call_id": "", "content": output}],
            tools=TOOLS,
        )
        if bridged is None:
            raise ValueError("the renderer cannot extend this conversation")
        self.is_sampled = self.sampled_mask()
        self.is_sampled += [False] * (len(bridged.token_ids) - len(self.is_sampled))
        self.prompt_ids = list(bridged.token_ids)
        self._completion_ids = []

    def sampled_mask(self) -> list[bool]:
        """Per token of `ids`: whether the agent wrote it."""
        return self.is_sampled + [True] * len(self._completion_ids)
