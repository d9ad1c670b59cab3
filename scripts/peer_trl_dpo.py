"""The peer's side of bench_dpo.py: TRL's DPOTrainer. Run in a virtual environment of its own; prints JSON lines: one for the reference, one a step."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peer_clock import Clock
from torch.utils.data import Sampler, SequentialSampler
from trl import DPOConfig, DPOTrainer


class LossClock(Clock):
    """Prints what was logged with a step too."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            print(json.dumps({"logged": state.global_step, "loss": logs["loss"]}), flush=True)


class Trainer(DPOTrainer):
    """The pairs in the order of the file, so that both sides' steps hold the same ones; and the seconds of the reference's log-probs."""

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        started = time.monotonic()
        out = super()._precompute_ref_logps(dataset, name, batch_size)
        print(json.dumps({"reference": len(dataset), "seconds": time.monotonic() - started}), flush=True)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="jsonl file of prompt, chosen, rejected")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="pairs an update")
    parser.add_argument("--micro-batch", type=int, required=True, help="pairs a forward pass")
    parser.add_argument("--tokens", type=int, required=True, help="longest prompt and answer")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data: Dataset = load_dataset("json", data_files=args.data, split="train", cache_dir=f"{args.out}/data")
    config = DPOConfig(
        output_dir=args.out,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.batch // args.micro_batch,
        max_length=args.tokens,
        max_steps=args.steps,
        precompute_ref_log_probs=True,
        beta=0.1,
        learning_rate=5e-6,
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
    Trainer(model=args.model, args=config, train_dataset=data, callbacks=[LossClock()]).train()


if __name__ == "__main__":
    main()
