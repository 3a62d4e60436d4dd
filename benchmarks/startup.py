"""How long `gyre` takes to answer: best of five, wall clock, each in a fresh process.

Owns nothing but the timing. Run: `make bench`.
"""

import subprocess
import sys
import time
from pathlib import Path

GYRE = Path(sys.executable).with_name("gyre")
QUICKSTART = Path(__file__).resolve().parent.parent / "examples/quickstart/quickstart.toml"
COMMANDS = (("--help",), ("config", "show", str(QUICKSTART)))
NUM_RUNS = 5


def seconds_of(arguments: tuple[str, ...]) -> float:
    begin_s = time.perf_counter()
    subprocess.run([GYRE, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - begin_s


def main() -> None:
    for arguments in COMMANDS:
        best_s = min(seconds_of(arguments) for _ in range(NUM_RUNS))
        print(f"gyre {' '.join(arguments[:2])}: {best_s:.3f} s")


if __name__ == "__main__":
    main()
