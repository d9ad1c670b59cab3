"""DAPO steps a second: `msrl train dapo` against TRL's GRPOTrainer with the DAPO loss, one after the other on the same cores and data.

Equal work: the same model in bfloat16, the same prompts x samples, the same length limit, one update a step, no dynamic sampling. A step is
everything from one update to the next: sampling, judging, update, and for msrl the hand-over of the weights. The first steps are warm-up.
The peer gets its best settings here: micro-batches of 32 rows, bfloat16 weights, no gradient checkpointing, tcmalloc where there is one.
Memory is the largest sum of PSS (shared pages counted once) over all processes of a side.

The last line is `ratio N.NN`: samples a second of msrl over TRL's.

    python scripts/bench_dapo.py --model .demo/model --data .demo/add20.train.parquet
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import ROOT, Memory, measure, peer_environment, tcmalloc  # noqa: F401


@dataclass
class Side:
    """What one side needed: seconds of each step after the warm-up, and memory in GiB."""

    name: str
    seconds: list[float]
    memory: float
    stages: str = ""

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)


def run_peer(args: argparse.Namespace, work: Path) -> Side:
    python = peer_environment(args.peer_env)
    command = [str(python), str(ROOT / "scripts" / "peer_trl_dapo.py"), "--model", str(args.model), "--data", str(args.data), "--out", str(work / "trl")]
    command += ["--steps", str(args.warmup + args.peer_steps), "--prompts", str(args.prompts), "--samples", str(args.samples)]
    command += ["--micro-batch", str(args.micro_batch), "--tokens", str(args.tokens), "--threads", str(args.cores)]
    env = {**tcmalloc(), "OMP_NUM_THREADS": str(args.cores), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    lines, memory = measure(command, env, work / "trl.log")
    steps = [json.loads(line)["seconds"] for line in lines if line.startswith('{"step"')]
    return Side("TRL", steps[args.warmup :], memory)


def run_ours(args: argparse.Namespace, work: Path) -> Side:
    settings = {
        "model": args.model,
        "data.train": args.data,
        "data.eval": "null",
        "rollout.samples_per_prompt": args.samples,
        "rollout.max_response_tokens": args.tokens,
        "train.batch_prompts": args.prompts,
        "train.steps": args.warmup + args.steps,
        "sampling.enabled": "false",
        "run.dir": work / "runs",
        "run.name": "bench",
    }
    command = [sys.executable, "-m", "rlcli.app", "train", "dapo", "--recipe", "demo", *(f"{key}={value}" for key, value in settings.items()), *args.settings]
    _, memory = measure(command, {}, work / "msrl.log")
    rows = [json.loads(line) for line in (work / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds/step" in row][args.warmup :]
    names = sorted({name for row in rows for name in row if name.startswith("seconds/")} - {"seconds/step"})
    stages = ", ".join(f"{name.removeprefix('seconds/')} {statistics.median(row.get(name, 0.0) for row in rows):.2f} s" for name in names)
    return Side("msrl", [row["seconds/step"] for row in rows], memory, stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="parquet file of the DAPO schema")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="most response tokens")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="first steps that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of msrl that count")
    parser.add_argument("--peer-steps", type=int, default=3, help="steps of TRL that count")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of TRL's micro-batch")
    parser.add_argument("--peer-env", type=Path, default=ROOT / ".bench" / "trl")
    parser.add_argument("--only", choices=("msrl", "trl"), help="run one side alone")
    parser.add_argument("settings", nargs="*", help="further settings of msrl, as key=value")
    args = parser.parse_args()
    args.model, args.data = args.model.resolve(), args.data.resolve()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    sides = []
    with tempfile.TemporaryDirectory(prefix="bench-dapo-") as work:
        for name, run in (("trl", run_peer), ("msrl", run_ours)):
            if args.only in (None, name):
                print(f"{name}:", flush=True)
                start = time.monotonic()
                sides.append(run(args, Path(work)))
                print(f"  ({time.monotonic() - start:.0f} s with start and end)\n", flush=True)
    report(sides, args)


def report(sides: list[Side], args: argparse.Namespace) -> None:
    count = args.prompts * args.samples
    print(f"{args.prompts} prompts x {args.samples} samples, {args.cores} cores, median of the steps")
    print(f"{'':6}{'s a step':>10}{'samples/s':>11}{'peak GiB':>10}{'steps':>7}   stages (medians)")
    for side in sides:
        print(f"{side.name:6}{side.step:>10.2f}{count / side.step:>11.2f}{side.memory:>10.2f}{len(side.seconds):>7}   {side.stages}")
    if len(sides) == 2:
        print(f"ratio {sides[0].step / sides[1].step:.2f}")


if __name__ == "__main__":
    main()
