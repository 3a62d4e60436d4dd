"""Hard stops on size: lines of a file; lines, parameters and nesting of a function.

Owns: the limits and the waiver list beside it. Must not know: what the code does.
Run: `python -m checks.size`. Invariant: the waiver list only shrinks. A waiver that is not
needed, or allows more than is there, fails; so does a list longer than MAX_WAIVERS.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "checks", "tests", "examples", "benchmarks")
LIMITS = {"function_lines": 60, "file_lines": 600, "parameters": 6, "nesting": 3}
WAIVERS = Path(__file__).with_name("size_waivers.txt")
MAX_WAIVERS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`size` of one thing; `where` is `path` or `path::name`."""

    where: str
    kind: str
    size: int


def measure(source: str, path: str) -> Iterator[Measure]:
    """The file, then each function in it, nested ones included."""
    yield Measure(where=path, kind="file_lines", size=len(source.splitlines()))
    for name, node in _functions(ast.parse(source, filename=path), ""):
        where = f"{path}::{name}"
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        yield Measure(where=where, kind="function_lines", size=lines)
        yield Measure(where=where, kind="parameters", size=_num_parameters(node.args))
        yield Measure(where=where, kind="nesting", size=max(map(_nesting, node.body)))


BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, Function | ast.ClassDef):
            inner = f"{prefix}{node.name}."
        if isinstance(node, Function):
            yield inner[:-1], node
        yield from _functions(node, inner)


def _num_parameters(args: ast.arguments) -> int:
    """All of them but self and cls."""
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    own = [arg for arg in named if arg.arg not in ("self", "cls")]
    return len(own) + sum(extra is not None for extra in (args.vararg, args.kwarg))


def _nesting(node: ast.stmt, *, is_elif: bool = False) -> int:
    """How deep blocks lie in each other; elif is no deeper than its if, a function begins anew."""
    if isinstance(node, Function | ast.ClassDef):
        return 0
    own = int(isinstance(node, BLOCKS) and not is_elif)
    return own + max(
        (_nesting(part, is_elif=_is_elif(part, node)) for part in _inner(node)), default=0
    )


def _inner(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements right inside `node`, those of its cases and handlers included."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.match_case | ast.ExceptHandler):
            yield from _inner(part)
        elif isinstance(part, ast.stmt):
            yield part


def _is_elif(part: ast.stmt, node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(part, ast.If) and node.orelse == [part]


def read_waivers(text: str) -> dict[tuple[str, str], int]:
    """Lines `where kind size`; # begins a comment. Returns (where, kind) -> allowed size."""
    rows = (line.split("#")[0].split() for line in text.splitlines())
    return {(row[0], row[1]): int(row[2]) for row in rows if row}


def find_breaches(
    measures: Iterable[Measure], waivers: Mapping[tuple[str, str], int], max_waivers: int
) -> list[str]:
    """One line for each thing that is too big and each waiver that should be gone."""
    breaches = []
    if len(waivers) > max_waivers:
        breaches.append(f"{len(waivers)} waivers: the list may only shrink, from {max_waivers}")
    found = {(item.where, item.kind): item.size for item in measures}
    for (where, kind), size in sorted(found.items()):
        allowed = waivers.get((where, kind), LIMITS[kind])
        if size > allowed:
            breaches.append(f"{where}: {kind} {size}, at most {allowed}")
    for (where, kind), allowed in sorted(waivers.items()):
        size = found.get((where, kind), 0)
        if size <= LIMITS[kind]:
            breaches.append(f"{where}: the {kind} waiver is not needed any more; remove it")
        elif size < allowed:
            breaches.append(f"{where}: {kind} is {size} now; lower its waiver from {allowed}")
    return breaches


def measure_repository(repository: Path) -> Iterator[Measure]:
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("*.py")):
            name = path.relative_to(repository).as_posix()
            yield from measure(path.read_text(encoding="utf-8"), name)


def main() -> int:
    waivers = read_waivers(WAIVERS.read_text(encoding="utf-8"))
    breaches = find_breaches(measure_repository(REPOSITORY), waivers, MAX_WAIVERS)
    for breach in breaches:
        print(breach)
    print(f"size: {len(breaches)} breaches, {len(waivers)} waivers")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
