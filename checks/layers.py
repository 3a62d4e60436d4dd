"""The layer table of the design, checked on the import graph: who may reach whom.

Owns: the table. Must not know: what the modules do. Run: `python -m checks.layers`.
Invariants checked: imports point down the table; siblings stay apart except where listed; the
pure layers reach no forbidden module, also not through others.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from checks.imports import PACKAGE, Graph, Import, import_graph

ROOT = Path(__file__).resolve().parent.parent / "src" / PACKAGE

# folder -> rank; a module imports only lower ranks, its own folder, or what SIDEWAYS lists.
RANKS = {
    "control": 0,
    "trajectory": 0,
    "seams": 1,
    "config": 1,
    "engines": 2,
    "gateway": 2,
    "trainer": 2,
    "transport": 2,
    "tasks": 2,
    "harness": 2,
    "store": 2,
    "simulate": 2,
    "views": 2,
    "runtime": 3,
    "cli": 4,
}
# (folder, module prefix it may import although the rank is its own)
SIDEWAYS = (
    ("trajectory", "control.ids"),
    ("trajectory", "control.errors"),
    ("config", "seams"),
    *((folder, "transport") for folder, rank in RANKS.items() if rank == 2),
    ("views", "store"),
    ("simulate", "engines.scripted"),
    ("simulate", "trainer.emulated"),
)
# Views read the store. What writes to it is the runtime's; a view may not take these names.
WRITERS = frozenset(
    {
        "store.journal.Journal",
        "store.journal.open_journal",
        "store.run_folder.create_run_folder",
        "store.segments.SegmentWriter",
        "store.derive.rebuild",
    }
)
IMPURE = frozenset(
    {
        "asyncio",
        "socket",
        "http",
        "os",
        "pathlib",
        "logging",
        "time",
        "random",
        "torch",
        "ray",
        "threading",
        "subprocess",
        "selectors",
        "ssl",
        "urllib",
        "secrets",
        "uuid",
        "datetime",
        "multiprocessing",
    }
)
STANDARD = frozenset(sys.stdlib_module_names)
FOREIGN = {"control": frozenset[str](), "trajectory": frozenset({"numpy", "msgspec"})}


def find_breaches(graph: Graph) -> list[str]:
    """All breaches as `module:line: words`, in the order of the modules."""
    return [*_rank_breaches(graph), *_purity_breaches(graph)]


def _rank_breaches(graph: Graph) -> list[str]:
    """Each once, however many names a line takes."""
    found = (
        f"{module}:{item.line}: {words}"
        for module, imports in graph.items()
        for item in imports
        if (words := _rank_breach(module, item.target) or _writer_breach(module, item))
    )
    return list(dict.fromkeys(found))


def _rank_breach(module: str, target: str) -> str:
    here, there = _folder(module), _folder(target)
    if not here or not there or here == there:
        return ""
    unknown = [name for name in (here, there) if name not in RANKS]
    if unknown:
        return f"{unknown[0]} is in no layer; the design lists all folders"
    if RANKS[there] < RANKS[here] or _may_sideways(here, target):
        return ""
    return f"{here} may not import {target.removeprefix(PACKAGE + '.')}"


def _writer_breach(module: str, item: Import) -> str:
    taken = f"{item.target.removeprefix(PACKAGE + '.')}.{item.name}"
    if _folder(module) == "views" and taken in WRITERS:
        return f"views only read the store, and may not import {taken}"
    return ""


def _may_sideways(folder: str, target: str) -> bool:
    """Whether `target` is one of SIDEWAYS' modules, or below one."""
    inner = target.removeprefix(f"{PACKAGE}.")
    return any(
        folder == importer and (inner == allowed or inner.startswith(f"{allowed}."))
        for importer, allowed in SIDEWAYS
    )


def _purity_breaches(graph: Graph) -> Iterator[str]:
    for module in (name for name in graph if _folder(name) in FOREIGN):
        folder = _folder(module)
        for chain in _chains_out(graph, module):
            if _is_impure(chain[-1], FOREIGN[folder]):
                yield f"{module}: {folder} is pure but reaches {' -> '.join(chain)}"


def _is_impure(name: str, allowed: frozenset[str]) -> bool:
    return name in IMPURE or (name not in STANDARD and name not in allowed)


def _chains_out(graph: Graph, start: str) -> Iterator[list[str]]:
    """For each foreign module that `start` reaches: the way there, without `start` itself."""
    seen = {start}
    ways: list[list[str]] = [[start]]
    while ways:
        way = ways.pop(0)
        for item in graph.get(way[-1], ()):
            if item.target in seen:
                continue
            seen.add(item.target)
            longer = [*way, item.target]
            if item.target in graph:
                ways.append(longer)
            elif item.target.split(".")[0] != PACKAGE:
                yield longer[1:]


def _folder(module: str) -> str:
    """`opengyre.gateway.app` -> `gateway`; "" for the package itself and foreign modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""


def main() -> int:
    breaches = find_breaches(import_graph(ROOT))
    for breach in breaches:
        print(breach)
    print(f"layers: {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
