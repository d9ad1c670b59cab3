"""Speed of one optimizer update at a rollout's shape: prefix sharing on and off, and transformers with a padded batch, in one run.

    LD_PRELOAD=libtcmalloc_minimal.so.4 python scripts/bench_train.py --model HF_FOLDER

Prints a table and, last, `ratio N.NN`: the update's seconds with prefix sharing off over those with it on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcli.algorithms.dapo import DapoLoss
from rlcli.data.pack import pack
from rlcli.engines.train import TrainRank, TrainSetup
from rlcli.types import TrainRow


@dataclass
class Shape:
    groups: int
    prompt: int
    samples: int
    response: int


def make_rows(shape: Shape, vocabulary: int) -> list[TrainRow]:
    """Random tokens; lengths vary a little, as they do in real groups."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(shape.groups):
        lengths = [max(1, shape.response - int(rng.integers(0, 2))) for _ in range(shape.samples)]
        values = {"advantage": 1.0, "weight": 1.0 / (shape.groups * shape.samples * shape.response), "rollout_logprobs": -1.0}
        fields = {name: [np.full(length, value, np.float32) for length in lengths] for name, value in values.items()}
        fields["advantage"] = [rng.normal(size=length).astype(np.float32) for length in lengths]
        prompt = rng.integers(0, vocabulary, shape.prompt - int(rng.integers(0, 3))).astype(np.int32)
        rows.append(TrainRow(prompt, [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths], fields))
    return rows


def timed(action: Any, repeats: int) -> float:
    """Seconds of the fastest of some runs after a first one."""
    action()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def ours(train: TrainRank, rows: list[TrainRow], sharing: str, bound: int, repeats: int) -> tuple[float, int]:
    """(seconds an update, tokens computed)."""
    batches = pack(rows, 1, bound, sharing)[0]
    loss = DapoLoss(old_is_current=True)
    return timed(lambda: train.update(batches, loss, 1e-6), repeats), sum(batch.tokens for batch in batches)


def theirs(folder: str, rows: list[TrainRow], dtype: str, batch: int) -> tuple[float, int]:
    """(seconds, tokens with padding) of transformers with SDPA and AdamW on padded batches of whole sequences."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    samples = [(row.prompt, response) for row in rows for response in row.responses]
    tokens = 0

    def update() -> None:
        nonlocal tokens
        tokens = 0
        for start in range(0, len(samples), batch):
            part = samples[start : start + batch]
            width = max(len(p) + len(r) for p, r in part)
            ids, mask = torch.zeros(len(part), width, dtype=torch.int64), torch.zeros(len(part), width, dtype=torch.int64)
            for i, (prompt, response) in enumerate(part):
                length = len(prompt) + len(response)
                ids[i, :length], mask[i, :length] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)), 1
            keep = max(len(r) for _, r in part) + 4
            logits = model(ids, attention_mask=mask, logits_to_keep=keep).logits[:, :-1].float()
            torch.log_softmax(logits, -1).gather(2, ids[:, -keep + 1 :, None]).sum().backward()
            tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(update, 1), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="HF folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=86, help="tokens")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--response", type=int, default=7, help="tokens")
    parser.add_argument("--bound", type=int, default=8192, help="tokens a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also time transformers, on batches of 32 padded sequences")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape(args.groups, args.prompt, args.samples, args.response)
    sides = []
    rows = make_rows(shape, 1000)
    if args.peer:  # before our ranks prepare the process for Megatron
        sides.append(("transformers, padded, 32 rows", *theirs(args.model, rows, args.dtype, 32)))
    with tempfile.TemporaryDirectory() as folder:
        train = TrainRank(TrainSetup(args.model, dtype=args.dtype, threads=args.threads), 0, 1, f"file://{Path(folder) / 'meet'}")
        sides.append(("prefix sharing off", *ours(train, rows, "off", args.bound, max(1, args.repeats - 1))))
        sides.append(("prefix sharing on", *ours(train, rows, "on", args.bound, args.repeats)))
        train.close()
    samples = args.groups * args.samples
    print(f"{'':32}{'tokens':>8}{'s/update':>10}{'tokens/s':>10}{'samples/s':>11}")
    for name, seconds, tokens in sides:
        print(f"{name:32}{tokens:8d}{seconds:10.2f}{tokens / seconds:10.0f}{samples / seconds:11.1f}")
    print(f"ratio {sides[-2][1] / sides[-1][1]:.2f}")


if __name__ == "__main__":
    main()
