"""What a run will hold in memory, in words, before anything is started.

Owns: the sum over a machine, and how much memory that has. Must not know torch, how a prediction is
made. Invariant: a model of which the sizes are not readable has no words here: loading it says why.
"""

from pathlib import Path

from opengyre.config.root import RunConfig
from opengyre.runtime.memory_plan import memory_plan, model_sizes, predicted
from opengyre.seams.errors import ConfigError
from opengyre.seams.memory import MemoryHeld
from opengyre.trainer.memory import in_engine

_MIB, _GIB = 2**20, 2**30
_NAMES = {
    "weights_bytes": "weights",
    "kv_pool_bytes": "KV up to",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations up to",
    "exposed_bytes": "exposed copies up to",
}


def memory_lines(config: RunConfig) -> list[str]:
    """One for each role of the core, which holds more than any other cell; none for cells that are
    not embedded."""
    try:
        roles = predicted(config, is_core=True)
    except ConfigError:
        return []
    return [
        f"the core in {role.value}: {_words(held)}" for role, held in roles.items() if _words(held)
    ]


def memory_warnings(config: RunConfig, *, has_bytes: int) -> list[str]:
    """A line if all processes in their larger roles hold more than `has_bytes` (0: unknown)."""
    try:
        needs_bytes = _run_bytes(config)
    except ConfigError:
        return []
    if not has_bytes or needs_bytes <= has_bytes:
        return []
    return [
        f"its cells and engines may hold {needs_bytes / _GIB:.1f} GiB, the programs themselves not "
        f"counted, but there are {has_bytes / _GIB:.1f} GiB; lower engine.max_batch, "
        "engine.kv_tokens, training.micro_step_tokens or the number of cells"
    ]


def machine_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of this process's control group if that may have less; 0 where
    the system does not say. Memory of devices is not in it."""
    limits = [_meminfo_bytes(root), *_group_bytes(root)]
    return min((one for one in limits if one), default=0)


def _run_bytes(config: RunConfig) -> int:
    topology = config.topology
    if topology.engine != "embedded":
        return 0
    cells = [predicted(config, is_core=cell == 0) for cell in range(topology.num_cells)]
    most = [max(one.needed_bytes for one in roles.values()) for roles in cells]
    alone = in_engine(model_sizes(config), memory_plan(config, is_core=False))
    return sum(most) + topology.num_standalone * alone.needed_bytes


def _words(held: MemoryHeld) -> str:
    parts = [(words, getattr(held, name)) for name, words in _NAMES.items()]
    return ", ".join(f"{words} {_size(num_bytes)}" for words, num_bytes in parts if num_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def _meminfo_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_bytes(root: Path) -> list[int]:
    """Of version 1 and 2, at this process's group and at the root of what is mounted here."""
    groups = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    mounted = root / "sys/fs/cgroup"
    files = []
    for _, kinds, path in groups:
        for place in dict.fromkeys((path.lstrip("/"), "")):
            if kinds == "":
                files.append(mounted / place / "memory.max")
            elif "memory" in kinds.split(","):
                files.append(mounted / "memory" / place / "memory.limit_in_bytes")
    told = [_read(file).strip() for file in files]
    return [int(one) for one in told if one.isdecimal()]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
