"""Tries an objective of the user's before the run, in a process of its own.

Owns: that process. Invariants: the parent imports neither torch nor the user's module; what is
wrong, a hang included, is one line.
"""

import os
import subprocess
import sys

from opengyre.config.load import parse_resolved, resolved_json
from opengyre.config.root import RunConfig
from opengyre.runtime.launcher import die_with_parent
from opengyre.seams.errors import ConfigError

TRIAL_S = 120.0


def try_own_objective(config: RunConfig, *, trial_s: float = TRIAL_S) -> None:
    """Nothing to do for a shipped one. Raises ConfigError."""
    name = config.training.objective
    if ":" not in name:
        return
    try:
        ended = subprocess.run(
            (sys.executable, "-m", __name__),
            input=resolved_json(config),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=trial_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"training.objective = {name}: expected an answer for five tokens within {trial_s:g} s"
        ) from error
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
        line = said[0].removeprefix("training.objective = ").removeprefix(f"{name}: ")
        raise ConfigError(f"training.objective = {name}: {line}")


def main() -> None:
    die_with_parent()
    from opengyre.runtime.objective import loss_of
    from opengyre.trainer.objectives.trial import try_objective

    config = parse_resolved(sys.stdin.read())
    try:
        loss = loss_of(config)
        try_objective(loss.objective, loss.settings, name=config.training.objective)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
