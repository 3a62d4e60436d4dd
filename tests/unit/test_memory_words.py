"""What a run says of its memory before it starts, and how much it takes a machine to have."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.config.load import load_config
from opengyre.config.root import RunConfig
from opengyre.runtime.memory_plan import predicted
from opengyre.runtime.memory_words import machine_bytes, memory_lines, memory_warnings
from opengyre.seams.memory import MemoryHeld
from opengyre.store.observations import Role

CONFIG = """
[run]
dir = "runs"
num_steps = 6
[model]
path = "model"
[[tasks]]
path = "tasks"
[topology]
engine = "embedded"
num_standalone = 0
"""
SCRIPTED = (
    "topology.engine=scripted",
    "topology.cell=emulated",
    "engine.scripted.policy=a.py:b",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("run")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    (path / "run.toml").write_text(CONFIG)
    return path


def _config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "run.toml", overrides)


def test_each_role_of_the_core_has_a_line_of_what_it_holds(folder: Path) -> None:
    rollout, training = memory_lines(_config(folder, "engine.kv_tokens=1048576"))
    assert rollout.startswith("the core in rollout: weights 0.1 MiB, KV up to 512.0 MiB, optimizer")
    assert training.startswith("the core in training: weights 0.1 MiB, gradients 0.1 MiB, optim")
    assert "activations up to" in training
    assert "activations" not in rollout


def test_the_cache_holds_what_its_key_says_by_default_a_context_for_each_request(
    folder: Path,
) -> None:
    row_bytes = 2 * 2 * 32 * 4
    for overrides, num_tokens in (
        ((), 32 * 8192),
        (("engine.kv_tokens=262144",), 262_144),
        (("engine.max_batch=4",), 4 * 8192),
        (("engine.max_batch=4", "engine.kv_tokens=65536"), 65_536),
    ):
        held = predicted(_config(folder, *overrides), is_core=False)[Role.ROLLOUT]
        assert held.kv_pool_bytes == num_tokens * row_bytes


def test_scripted_engines_have_no_line(folder: Path) -> None:
    config = _config(folder, *SCRIPTED)
    assert memory_lines(config) == []
    assert memory_warnings(config, has_bytes=1) == []


def test_a_model_without_sizes_has_no_words_here(folder: Path) -> None:
    config = _config(folder, "model.path=elsewhere")
    assert memory_lines(config) == []
    assert memory_warnings(config, has_bytes=1) == []


def test_more_than_the_machine_has_is_one_warning(folder: Path) -> None:
    config = _config(folder, "engine.kv_tokens=1048576", "topology.num_cells=3")
    cells = [predicted(config, is_core=is_core) for is_core in (True, False, False)]
    most = sum(max(one.needed_bytes for one in roles.values()) for roles in cells)
    assert memory_warnings(config, has_bytes=most) == []
    assert memory_warnings(config, has_bytes=0) == []
    (line,) = memory_warnings(config, has_bytes=most - 1)
    assert line.startswith("its cells and engines may hold 1.5 GiB")
    assert "\n" not in line


def test_standalone_engines_count_too(folder: Path) -> None:
    cells = _config(folder, "topology.num_cells=2")
    more = _config(folder, "topology.num_cells=2", "topology.num_standalone=2")
    most = sum(
        max(one.needed_bytes for one in predicted(cells, is_core=is_core).values())
        for is_core in (True, False)
    )
    assert memory_warnings(cells, has_bytes=most) == []
    assert len(memory_warnings(more, has_bytes=most)) == 1


def test_a_prediction_is_of_both_roles_and_of_embedded_cells_only(folder: Path) -> None:
    roles = predicted(_config(folder), is_core=False)
    assert set(roles) == {Role.ROLLOUT, Role.TRAINING}
    assert roles[Role.ROLLOUT].gradients_bytes == roles[Role.TRAINING].kv_pool_bytes == 0
    assert MemoryHeld() not in roles.values()
    scripted = _config(folder, *SCRIPTED)
    assert predicted(scripted, is_core=True) == {}


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:        1000 kB\nMemFree:  10 kB\n"}


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        ({}, 0),
        (MEMINFO, 1_024_000),
        ({**MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 1_024_000),
        ({**MEMINFO, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        ({**MEMINFO, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/memory.max": "5000\n"}, 5000),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "4:cpu,memory:/b\n1:cpu:/\n",
                "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "8192\n",
            },
            8192,
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "4:memory:/b\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            1_024_000,
        ),
    ],
)
def test_a_machine_has_what_its_control_group_leaves_it(
    files: dict[str, str], num_bytes: int, tmp_path: Path
) -> None:
    assert machine_bytes(_machine(tmp_path, files)) == num_bytes
