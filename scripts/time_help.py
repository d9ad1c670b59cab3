"""How long `msrl --help` takes: the median of some starts, in wall and in processor seconds. The aim is below 0.3 s."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

STARTS = 9
COMMAND = [sys.executable, "-m", "rlcli.app", "--help"]


def once() -> tuple[float, float]:
    """(wall, processor) seconds of one start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(COMMAND, stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    once()  # fills the caches
    walls, busy = zip(*(once() for _ in range(STARTS)), strict=True)
    print(f"msrl --help: {statistics.median(walls):.3f} s (processor {statistics.median(busy):.3f} s), median of {STARTS} starts")


if __name__ == "__main__":
    main()
