"""Finds an installed agent program, and what must be readable for it to run.

Owns: where programs are looked for. Must not know: profiles' texts, sandboxes. Invariant: no more
than the program's own files becomes readable, never a folder that holds other things of its user.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from opengyre.config.harness_profile import HarnessProfile
from opengyre.seams.errors import ConfigError

INSTALLED = Path(".harnesses")
"""What `make harnesses` fills: npm prefixes and virtual environments, one folder each."""
INSTALLED_BINS = ("*/node_modules/.bin", "*/bin")
SYSTEM_ROOTS = (Path("/usr"), Path("/bin"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`path` is what is started; `bins` belong on its PATH; `read_only_paths` are its files."""

    path: Path
    bins: tuple[Path, ...] = ()
    read_only_paths: tuple[Path, ...] = ()

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """What a launch must be able to read, the program first."""
        return (self.path, *self.read_only_paths)


def find_program(profile: HarnessProfile, named: Path | None = None) -> Program | None:
    """The profile's program: `named` by the user, below .harnesses, or on the PATH.

    None if the profile names none. Raises ConfigError in one line if it, or one that it needs,
    is not there.
    """
    if profile.launch.program is None:
        if named is not None:
            raise ConfigError(f"{named}: {profile.name} starts no program; leave it out")
        return None
    path = named or _installed(profile.launch.program) or _on_path(profile.launch.program)
    if path is None or not os.access(path, os.X_OK):
        what = str(named or profile.launch.program)
        advice = profile.install or "install it, or name it with harness.program"
        raise ConfigError(f"{profile.name} needs the program {what}, which is not there: {advice}")
    needed = [_needed(name, profile) for name in profile.launch.needs]
    paths = [path.absolute(), *needed]
    return Program(
        path=paths[0],
        bins=tuple(one.parent for one in needed if not _is_system(one)),
        read_only_paths=tuple(root for one in paths for root in install_roots(one)),
    )


def install_roots(path: Path) -> tuple[Path, ...]:
    """The files that `path` runs from: an npm tree, a virtual environment with its base, itself."""
    real = path.resolve()
    if _is_system(real):
        return ()
    if "node_modules" in real.parts:
        return (Path(*real.parts[: real.parts.index("node_modules") + 1]),)
    settings = real.parent.parent / "pyvenv.cfg"
    if settings.is_file():
        base = _base_of(settings)
        return (settings.parent,) if base is None or _is_system(base) else (settings.parent, base)
    return (real,)


def _installed(name: str) -> Path | None:
    found = (bins / name for pattern in INSTALLED_BINS for bins in INSTALLED.glob(pattern))
    return next((path for path in sorted(found) if path.is_file()), None)


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)


def _needed(name: str, profile: HarnessProfile) -> Path:
    found = _on_path(name)
    if found is None:
        raise ConfigError(f"{profile.name} needs {name} on the PATH, which is not there")
    return found


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(root) for root in SYSTEM_ROOTS)


def _base_of(settings: Path) -> Path | None:
    """The prefix of the interpreter that a virtual environment was made with."""
    for line in settings.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip()).resolve().parent
    return None
