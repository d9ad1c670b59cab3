"""How often a CPU's mathematical functions lose half their digits because two threads ask for them first (see rlcli/platforms/precision.py).

    python scripts/torture_first_calls.py [--starts 16000] [--beside 8]

Forks processes that compute the cosines of one table twice, on two threads; counts those whose first result differs from their second, without and
with `precision.settle`, the way that workers start. So many processes run beside one another that their threads are late, which the fault needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNT = """
import os, sys
import torch
from rlcli.platforms import precision
starts, settle, found = int(sys.argv[1]), sys.argv[2] == "1", 0
torch.set_num_threads(2)
for _ in range(starts):
    child = os.fork()
    if not child:
        if settle:
            precision.settle()
        table = torch.arange(1 << 16, dtype=torch.float32) * 0.01
        os._exit(0 if torch.equal(table.cos(), table.cos()) else 1)
    found += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(found)
"""


def count(starts: int, settle: bool) -> int:
    """First results that differ, of so many starts in one process."""
    command = [sys.executable, "-c", COUNT, str(starts), str(int(settle))]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"}, stdout=subprocess.PIPE, text=True, check=True)
    return int(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=16_000)
    parser.add_argument("--beside", type=int, default=8)
    options = parser.parse_args()
    each = options.starts // options.beside
    for settle in (False, True):
        with ThreadPoolExecutor(options.beside) as pool:
            found = sum(pool.map(lambda _, settle=settle: count(each, settle), range(options.beside)))
        print(f"{'settled' if settle else 'not settled'}: {found} of {each * options.beside} first results differ", flush=True)


if __name__ == "__main__":
    main()
