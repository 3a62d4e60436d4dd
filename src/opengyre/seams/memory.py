"""What a process holds in memory, by what it is for; and that before and after a change of role.

Owns: the words of the account. Must not know: how anything is measured or predicted. Invariant:
every number is bytes, of all processes of a cell together.
"""

from collections.abc import Iterable

import msgspec


class MemoryHeld(msgspec.Struct, frozen=True, kw_only=True):
    """`weights`: of engine and stages, the reference for a divergence too. `kv_pool` is what the KV
    memory may hold, 0 while it is released; `kv_used` is what is cached in it, and only that much
    and what was cached before takes memory. `gradients`: sums, and their reduced copy while there
    is one. `optimizer`: moments. `activations`: the most that a micro-step took beside all this
    since the last reading, measured as growth of `resident` (0 where nothing was trained, or the
    system does not say). `exposed`: copies that others pull. `resident`: what the system counts for
    the processes, libraries too; on CUDA what is allocated on the device.
    """

    weights_bytes: int = 0
    kv_pool_bytes: int = 0
    kv_used_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    exposed_bytes: int = 0
    resident_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """All that is for something, with a full KV pool: not the program itself."""
        return (
            self.weights_bytes
            + self.kv_pool_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.exposed_bytes
        )


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of one change of role. `predicted` is the most that the role after it holds; its `resident`
    is `needed_bytes`, without what the program itself takes."""

    before: MemoryHeld
    after: MemoryHeld
    predicted: MemoryHeld


def all_held(parts: Iterable[MemoryHeld]) -> MemoryHeld:
    """What several processes hold together."""
    total = dict.fromkeys(MemoryHeld.__struct_fields__, 0)
    for one in parts:
        for name in total:
            total[name] += getattr(one, name)
    return MemoryHeld(**total)
