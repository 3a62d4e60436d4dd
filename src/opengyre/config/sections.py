"""Settings of the parts around the scheduler and the trainer, one model for each TOML table.

Owns: keys, defaults, bounds. Must not know: how a part uses them; parts get values, not files.
"""

from typing import Annotated, Literal

from pydantic import Field

from opengyre.config.base import CallablePath, ConfigPath, HarnessName, ModelPath, Section

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class RunSection(Section):
    """`[run]`: what this run is called, where it lives, how long it goes."""

    dir: ConfigPath = Field(description="folder that holds the run folders")
    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="first part of the run folder",
    )
    seed: Seed = Field(default=0, description="seed of task order, sampling and initial states")
    num_steps: int = Field(ge=1, le=10_000_000, description="optimizer updates of the run")


class ModelConfig(Section):
    """`[model]`: the policy that is trained."""

    path: ModelPath = Field(description="model folder (safetensors + tokenizer) or hub id")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="type of weights and activations; no bfloat16 where cells train",
    )


class TaskSourceConfig(Section):
    """One `[[tasks]]` table. Several sources are mixed by weight."""

    path: ConfigPath = Field(description="folder of Harbor-format task folders")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="share among the sources")
    seed: Seed = Field(default=0, description="seed of the order in which its tasks come")


class EvalConfig(Section):
    """`[eval]`: held-out tasks, one execution each, run like all others but never trained."""

    path: ConfigPath = Field(description="folder of held-out task folders")
    every_bursts: int = Field(default=0, ge=0, description="bursts between evaluations; 0 is never")
    deadline_s: float = Field(
        default=120.0, gt=0, le=86_400, description="longest time an evaluation may hold up the end"
    )
    at_start: bool = Field(default=True, description="evaluate before the first burst")
    at_end: bool = Field(default=True, description="evaluate after the last step")


class SamplingConfig(Section):
    """`[sampling]`: how the policy's tokens are drawn, and how many."""

    temperature: float = Field(default=1.0, ge=0, le=10, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 keeps all")
    top_k: int = Field(default=0, ge=0, description="most likely tokens kept; 0 keeps all")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="least share of the likeliest token's probability"
    )
    max_new_tokens: int = Field(default=512, ge=1, description="most sampled tokens of one turn")
    context_tokens: int = Field(
        default=8192, ge=2, description="most tokens of one path, prompt included"
    )


class HarnessLimits(Section):
    """`[harness.limits]`: what one launch may use. Crossing a bound costs that execution only."""

    memory_bytes: int = Field(
        default=2 << 30, ge=1 << 26, description="memory of each process, and of all together"
    )
    file_size_bytes: int = Field(
        default=1 << 30, ge=1 << 10, description="size of each file it writes"
    )
    output_bytes: int = Field(
        default=16 << 20, ge=1 << 10, description="stdout and stderr together"
    )
    num_processes: int = Field(default=128, ge=2, description="processes below the harness")
    num_open_files: int = Field(default=1024, ge=16, description="open files of each process")


class HarnessConfig(Section):
    """`[harness]`: the agent program."""

    profile: HarnessName = Field(
        default="gyre-agent",
        description="a shipped profile (see `gyre harness list`), or the path of a .toml file",
    )
    program: ConfigPath | None = Field(
        default=None, description="the profile's program; left out: .harnesses, then the PATH"
    )
    command: tuple[str, ...] = Field(
        default=(),
        description='program and arguments (profile = "command"); it gets OPENAI_BASE_URL',
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=604_800, description="deadline of one execution"
    )
    overall_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=2_592_000,
        description="deadline of one execution from its first launch on, time in which it was held "
        "and relaunches included; left out: none",
    )
    overall_timeout_verdict: Literal["none", "graded"] = Field(
        default="none",
        description="what becomes of an execution that overall_timeout_s ended: no verdict, or "
        "graded like any other",
    )
    max_turns: int = Field(
        default=50, ge=1, le=100_000, description="model calls of the bundled agent"
    )
    limits: HarnessLimits = Field(default=HarnessLimits(), description="what one execution may use")


class ScriptedConfig(Section):
    """`[engine.scripted]`: tokens by a program instead of a model, for tests and demonstrations."""

    policy: CallablePath | None = Field(
        default=None, description="file.py:function or module:function that writes the tokens"
    )
    tokens_per_s: float = Field(
        default=200.0, ge=0, le=1e6, description="speed of one request; 0 is as fast as it can"
    )
    mistakes: float = Field(
        default=0.0, ge=0, le=1, description="how often the policy errs; 0 never"
    )


class EngineConfig(Section):
    """`[engine]`: memory and batch of each rollout engine."""

    kv_tokens: int | None = Field(
        default=None,
        ge=2,
        description="tokens that the KV cache holds, at least a whole context for each request of "
        "max_batch, which is the default; what is more keeps prefixes of earlier turns",
    )
    max_batch: int = Field(default=32, ge=1, le=4096, description="requests of one forward pass")
    prefill_tokens: int = Field(default=512, ge=1, description="prompt tokens of one forward pass")
    threads: int = Field(default=1, ge=1, le=1024, description="torch threads of each process")
    kv_handoff: Literal["off", "on", "auto"] = Field(
        default="auto",
        description="whether a moved request's keys and values are read from where it ran; auto: "
        "where that is faster than computing them",
    )
    kv_lease_s: float = Field(
        default=10.0, gt=0, le=30, description="longest time they are kept for the reader"
    )
    kv_handoff_idle: bool = Field(
        default=False, description="hand over prefixes of executions inside a tool call too"
    )
    scripted: ScriptedConfig = Field(
        default=ScriptedConfig(), description='used with engine = "scripted"'
    )


class GatewayConfig(Section):
    """`[gateway]`: the HTTP server harnesses talk to."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address it listens on")
    port: int = Field(
        default=0, ge=0, le=65_535, description="of the first process, the next ones follow; 0: any"
    )
    num_processes: int = Field(
        default=1, ge=1, le=64, description="processes that share the executions"
    )
    hold_comment_s: float = Field(
        default=8.0, gt=0, le=60, description="time between comments on a stream that is held"
    )
    allow_rerender: bool = Field(
        default=False,
        description="train a model whose format cannot be extended: each turn is a path of its own",
    )


class StoreConfig(Section):
    """`[store]`: what stays in the run folder."""

    keep_checkpoints: int = Field(default=2, ge=1, le=10_000, description="newest checkpoints kept")
