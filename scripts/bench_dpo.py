"""Preference pairs a second: `msrl train dpo` against TRL's DPOTrainer, one after the other on the same cores and the same pairs.

Equal work: the same model in bfloat16, the same pairs in the same order, the same limit on prompt and answer, the same pairs an update, the
reference's log-probs computed before training on both sides. Pairs whose prompt fills the limit are left out for both.
The peer gets its best settings here: bfloat16 weights, no gradient checkpointing, tcmalloc where there is one, and small micro-batches, since
it pads each to its longest answer (this version of it has no padding-free mode).

Two rates are shown: training with the reference in the cache (median step after the warm-up), and a whole first epoch, the making of the cache
counted. The second is put together from both measured rates, since only some steps are run: a pair costs 1 / training rate + 1 / reference rate.
Memory is the largest sum of PSS (shared pages counted once) over all processes of a side.

The last line is `ratio N.NN`: the smaller one of the two ratios, msrl over TRL.

    python scripts/bench_dpo.py --model .demo/model --data dpo_en_demo.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import ROOT, measure, peer_environment, tcmalloc

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
REFERENCE = re.compile(r"reference log-probs of (\d+) pairs: \d+ computed in ([\d.]+) s")
DEMO = ROOT / ".demo" / "pairs.train.jsonl"


@dataclass
class Side:
    """Seconds of each step after the warm-up, seconds a pair of the reference's log-probs, and memory in GiB."""

    name: str
    seconds: list[float]
    reference: float
    memory: float
    losses: list[float]
    note: str = ""

    def rate(self, batch: int) -> float:
        """Pairs a second with the reference in the cache."""
        return batch / statistics.median(self.seconds)

    def epoch_rate(self, batch: int) -> float:
        """Pairs a second over one epoch that begins without a cache."""
        return 1.0 / (1.0 / self.rate(batch) + self.reference)


def messages(turns: Any) -> list[dict[str, str]]:
    """Turns in either usual form as role and content; a text is the user's."""
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    turns = [turns] if isinstance(turns, dict) else turns
    return [{"role": ROLES.get(turn.get("from", ""), turn.get("role", "")), "content": turn.get("value", turn.get("content"))} for turn in turns]


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """Rows of prompt, chosen and rejected, each a list of messages, from jsonl or a JSON list."""
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    return [
        {"prompt": messages(row.get("prompt", row.get("conversations"))), "chosen": messages(row["chosen"]), "rejected": messages(row["rejected"])}
        for row in rows
    ]


def write_subset(args: argparse.Namespace, out: Path) -> int:
    """Write the first pairs whose prompts leave room for an answer, as many as the steps take; how many there are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = []
    for row in read_pairs(args.data):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        if row["chosen"] != row["rejected"] and len(prompt) <= args.tokens * 3 // 4:
            rows.append(row)
    rows = rows[: (args.warmup + args.steps) * args.batch]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def run_peer(args: argparse.Namespace, data: Path, work: Path) -> Side:
    command = [str(peer_environment(args.peer_env)), str(ROOT / "scripts" / "peer_trl_dpo.py"), "--model", str(args.model), "--data", str(data)]
    command += ["--out", str(work / "trl"), "--steps", str(args.warmup + args.steps), "--batch", str(args.batch)]
    command += ["--micro-batch", str(args.micro_batch), "--tokens", str(args.tokens), "--threads", str(args.cores)]
    env = {**tcmalloc(), "OMP_NUM_THREADS": str(args.cores), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    lines, memory = measure(command, env, work / "trl.log")
    said = [json.loads(line) for line in lines if line.startswith('{"')]  # what TRL itself logs has single quotes
    steps = [row["seconds"] for row in said if "step" in row]
    reference = next(row["seconds"] / row["reference"] for row in said if "reference" in row)
    return Side("TRL", steps[args.warmup :], reference, memory, [float(row["loss"]) for row in said if "logged" in row])


def run_ours(args: argparse.Namespace, data: Path, work: Path) -> Side:
    settings = {
        "model": args.model,
        "data.train": data,
        "data.eval": "null",
        "data.shuffle": "false",
        "data.max_tokens": args.tokens,
        "data.max_prompt_tokens": args.tokens * 3 // 4,
        "data.truncation": "keep_answer_start",
        "optim.lr": 5e-6,
        "optim.weight_decay": 0.0,
        "train.batch_pairs": args.batch,
        "train.steps": args.warmup + args.steps,
        "run.dir": work / "runs",
        "run.name": "bench",
    }
    command = [sys.executable, "-m", "rlcli.app", "train", "dpo", "--recipe", "demo_dpo", *(f"{key}={value}" for key, value in settings.items()), *args.settings]
    lines, memory = measure(command, {}, work / "msrl.log")
    count, seconds = next(found.groups() for line in lines if (found := REFERENCE.search(line)))
    rows = [json.loads(line) for line in (work / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds/step" in row]
    tokens = sum(row["update/computed_tokens"] for row in rows) / sum(row["update/pairs"] for row in rows)
    timed = rows[args.warmup :]
    return Side("msrl", [row["seconds/step"] for row in timed], float(seconds) / int(count), memory, [row["update/loss"] for row in rows], f"{tokens:.0f} tokens a pair")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DEMO, help="pairs: jsonl or a JSON list; where the file is not there, the demo's own pairs")
    parser.add_argument("--batch", type=int, default=16, help="pairs an update")
    parser.add_argument("--tokens", type=int, default=512, help="longest prompt and answer")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="first steps that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--micro-batch", type=int, default=1, help="pairs of TRL's micro-batch")
    parser.add_argument("--peer-env", type=Path, default=ROOT / ".bench" / "trl")
    parser.add_argument("--only", choices=("msrl", "trl"), help="run one side alone")
    parser.add_argument("settings", nargs="*", help="further settings of msrl, as key=value")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    args.model = args.model.resolve()
    args.data = args.data.resolve() if args.data.exists() else DEMO
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    sides = []
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as work:
        data = Path(work) / "pairs.jsonl"
        print(f"{write_subset(args, data)} pairs of {args.data.name}", flush=True)
        for name, run in (("trl", run_peer), ("msrl", run_ours)):
            if args.only in (None, name):
                print(f"{name}:", flush=True)
                sides.append(run(args, data, Path(work)))
    report(sides, args)


def report(sides: list[Side], args: argparse.Namespace) -> None:
    print(f"{args.batch} pairs an update, at most {args.tokens} tokens, {args.cores} cores, median of the steps")
    print(f"{'':6}{'s a step':>10}{'pairs/s':>10}{'reference pairs/s':>19}{'epoch pairs/s':>15}{'peak GiB':>10}{'steps':>7}")
    for side in sides:
        step = statistics.median(side.seconds)
        print(
            f"{side.name:6}{step:>10.2f}{side.rate(args.batch):>10.2f}{1 / side.reference:>19.2f}{side.epoch_rate(args.batch):>15.2f}"
            f"{side.memory:>10.2f}{len(side.seconds):>7}   {side.note}"
        )
    for side in sides:
        print(f"loss of each step, {side.name:5}" + " ".join(f"{loss:.4f}" for loss in side.losses))
    if len(sides) == 2:
        cached = sides[1].rate(args.batch) / sides[0].rate(args.batch)
        epoch = sides[1].epoch_rate(args.batch) / sides[0].epoch_rate(args.batch)
        print(f"reference cached {cached:.2f} times, a whole epoch with the cache made {epoch:.2f} times")
        print(f"ratio {min(cached, epoch):.2f}")


if __name__ == "__main__":
    main()
