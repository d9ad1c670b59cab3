"""The demo's run: `msrl train dapo --recipe demo` on the prepared addition task, then the accuracy on held-out prompts before and after.

Called by `make demo`, which makes the model and prepares the data first. Further arguments are settings: train.steps=5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def evaluations(run: Path) -> list[tuple[int, float]]:
    """(step, accuracy) of each evaluation in a run's metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".demo/prepared"), help="folder with the prepared train and test data")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("settings", nargs="*", help="settings of the run, as key=value")
    args = parser.parse_args()
    name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "rlcli.app", "train", "dapo", "--recipe", "demo", f"data.train={args.data / 'train'}", f"data.eval={args.data / 'test'}"]
    command += [f"run.dir={args.runs}", f"run.name={name}", *args.settings]
    print("$ " + " ".join(["msrl", *command[3:]]), flush=True)
    start = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status:
        return status
    run = args.runs / name
    measured = evaluations(run)
    print(f"\nThe demo took {(time.monotonic() - start) / 60:.1f} minutes.")
    if len(measured) > 1:
        (_, before), (last, after) = measured[0], measured[-1]
        print(f"Accuracy on held-out sums: {before:.1%} before, {after:.1%} after {last} step{'s' * (last != 1)}.")
    print(f"The run's folder: {run} (open {run / 'report.html'} in a browser; `msrl samples {run}` prints what the model wrote)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
