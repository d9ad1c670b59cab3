"""The peer's side of bench_dapo.py: TRL's GRPOTrainer with the DAPO loss. Run in a virtual environment of its own; prints one JSON object a step."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from peer_clock import Clock
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """+1 where the text after "Answer:" is the right number, else -1."""
    found = (re.search(r"(?i)Answer\s*:\s*([^\n]+)", completion[0]["content"]) for completion in completions)
    return [1.0 if match and match[1].strip() == right else -1.0 for match, right in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = pq.read_table(args.data).to_pylist()
    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows])
    config = GRPOConfig(
        output_dir=args.out,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.samples // args.micro_batch,
        num_generations=args.samples,
        max_completion_length=args.tokens,
        max_steps=args.steps,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        use_cpu=True,
        bf16=False,  # the weights themselves are bfloat16: faster here than autocast
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16"},
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    GRPOTrainer(model=args.model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()]).train()


if __name__ == "__main__":
    main()
