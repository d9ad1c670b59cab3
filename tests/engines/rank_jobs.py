"""What the training tests run inside ranks: functions that `ranks.launch` can send to spawned processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcli.algorithms.base import LossOutput, Tokens
from rlcli.config.schema import OptimConfig, ParallelConfig
from rlcli.data.pack import pack, unpack
from rlcli.engines.train import TrainRank, TrainSetup
from rlcli.types import TrainRow

OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-3, clip_grad=1.0)
LR = 1e-3


@dataclass
class RatioLoss:
    """A loss with curvature: the sum of advantage * exp(log-prob / 10), less an entropy bonus."""

    entropy_coef: float = 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    def __call__(self, tokens: Tokens) -> LossOutput:
        loss = (tokens.fields["advantage"] * torch.exp(tokens.logprobs_N / 10)).sum()
        if tokens.entropy_N is not None and self.needs_entropy:
            loss = loss - self.entropy_coef * tokens.entropy_N.sum()
        sums = {"loss": loss.detach(), "tokens": torch.tensor(float(len(tokens.logprobs_N)))}
        return LossOutput(loss, sums, {"largest": tokens.fields["advantage"].max()})


@dataclass
class Job:
    """One TrainRank's life: its layout, and what is asked of it."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    bound: int = 4000
    sharing: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    loss: RatioLoss = field(default_factory=RatioLoss)
    updates: int = 0


def make_rank(job: Job, rank: int, world: int, folder: Path, name: str) -> TrainRank:
    parallel = ParallelConfig(devices=world, tensor=job.tensor, pipeline=job.pipeline)
    setup = TrainSetup(job.model, OPTIM, parallel, dtype="float32", micro_batch_tokens=job.bound, prefix_sharing=job.sharing, threads=1, timeout_s=60)
    return TrainRank(replace(setup, **job.options), rank, world, f"file://{folder}/meet-{name}")


def share_of(job: Job, rows: list[TrainRow], rank: int, world: int) -> tuple[list[Any], list[Any]]:
    """(this rank's micro-batches, those of all data parallel ranks)."""
    data = world // (job.tensor * job.pipeline)
    packed = pack(rows, data, job.bound, job.sharing)
    return packed[rank // job.tensor % data], packed


def run_jobs(rank: int, world: int, folder: Path, jobs: dict[str, Job], rows: list[TrainRow]) -> dict[str, dict[str, Any]]:
    """Each job from a fresh start: log-probs, gradients, then some updates and the weights after them."""
    out = {}
    for name, job in jobs.items():
        train = make_rank(job, rank, world, folder, name)
        mine, packed = share_of(job, rows, rank, world)
        logprobs, entropies = train.logprobs(mine)
        gradients = train.gradients(mine, job.loss)
        results = [train.update(mine, job.loss, LR) for _ in range(job.updates)]
        out[name] = {
            "logprobs": logprobs,
            "entropies": entropies,
            "gradients": gradients,
            "results": results,
            "weights": weights_of(train),
            "packed": packed,
            "speaks": train.speaks,
        }
        train.close()
    return out


def weights_of(train: TrainRank) -> dict[str, np.ndarray]:
    """This stage's weights by HF name, on ranks that give them out."""
    from rlcli.engines.weights_out import whole_weights

    named = {name: tensor.float().clone().numpy() for name, tensor in whole_weights(train.model, train.spec, train.layout, train.dtype)}
    return named if train.writes else {}


def joined(answers: list[dict[str, dict[str, Any]]], name: str, key: str) -> dict[str, np.ndarray]:
    """Weights or gradients of all stages together."""
    return {hf_name: array for answer in answers for hf_name, array in answer[name][key].items()}


def per_response(answers: list[dict[str, dict[str, Any]]], name: str, key: str, rows: list[TrainRow]) -> list[list[np.ndarray]]:
    """Log-probs or entropies in the shape of the rows, from the ranks that report them."""
    speakers = [answer[name] for answer in answers if answer[name]["speaks"]]
    batches = [batch for share in speakers[0]["packed"] for batch in share]
    return unpack(rows, batches, [values for answer in speakers for values in answer[key]])
