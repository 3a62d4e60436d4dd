"""Which module of the package imports what, by parsing alone; nothing is imported.

Owns: turning source files into an import graph. Must not know: which imports are allowed.
Invariant: imports inside functions and below TYPE_CHECKING count like all others. Packages above
an imported module are left out: their `__init__` files are empty (checks/folders.py).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "opengyre"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`target` is imported on `line`; a module of the package in full, others by first word.

    `name` is what was taken out of the target, or "" for the target itself.
    """

    target: str
    line: int
    name: str = ""


Graph = Mapping[str, tuple[Import, ...]]


def module_files(root: Path) -> dict[str, Path]:
    """Module name -> file, for all Python files below `root` (the folder of the package)."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def import_graph(root: Path) -> Graph:
    files = module_files(root)
    return {module: tuple(_imports(path, module, files)) for module, path in sorted(files.items())}


def _imports(path: Path, module: str, known: Mapping[str, Path]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(target=_shorten(alias.name), line=node.lineno)
            case ast.ImportFrom(names=names):
                base = _base(node, module, is_package=path.name == "__init__.py")
                for alias in names:
                    yield _from(base, alias.name, line=node.lineno, known=known)


def _from(base: str, name: str, *, line: int, known: Mapping[str, Path]) -> Import:
    """`from package import module` is an import of the module, all others of the base."""
    inner = f"{base}.{name}"
    if inner in known:
        return Import(target=inner, line=line)
    return Import(target=_shorten(base), line=line, name=name)


def _base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The absolute module of `from ... import`, relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def _shorten(target: str) -> str:
    """Modules of the package in full; of foreign ones the first word counts."""
    first = target.split(".")[0]
    return target if first == PACKAGE else first
