"""Names and files that the house style forbids in the package.

Owns: the list. Must not know: imports and sizes. Run: `python -m checks.folders`.
Invariants checked: no module or folder named after nothing in particular; every `__init__.py`
is empty; every folder of modules has one.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "opengyre"
FORBIDDEN = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})


def find_breaches(root: Path) -> list[str]:
    breaches = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        words = {part.strip("_") for part in path.relative_to(root).with_suffix("").parts}
        if words & FORBIDDEN:
            breaches.append(f"{name}: name it after what it owns, not {sorted(words & FORBIDDEN)}")
        if path.name == "__init__.py" and path.read_text(encoding="utf-8").strip():
            breaches.append(f"{name}: must be empty, so that importing one module loads only it")
        if not (path.parent / "__init__.py").exists():
            breaches.append(f"{name}: its folder has no __init__.py")
    return breaches


def main() -> int:
    breaches = find_breaches(ROOT)
    for breach in breaches:
        print(breach)
    print(f"folders: {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
