"""One training rank: a slice of the model in Megatron-core, its optimizer, and what the driver asks of it.

Plain Python over torch.distributed: an actor, a spawned process or a single process can hold a TrainRank. Megatron is
imported only once the platform has prepared the process, so importing this module costs nothing.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.config.schema import OptimConfig, ParallelConfig
from rlcli.data.pack import MicroBatch
from rlcli.engines.base import UpdateResult
from rlcli.errors import UserError
from rlcli.types import FloatArray

if TYPE_CHECKING:
    from rlcli.algorithms.base import Loss


@dataclass(frozen=True, slots=True)
class TrainSetup:
    """What every rank is told; picklable."""

    model: str  # HF folder
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: str = "bfloat16"
    temperature: float = 1.0
    micro_batch_tokens: int = 8192
    head_chunk_tokens: int = 1024
    prefix_sharing: str = "auto"
    recompute: bool = False
    seed: int = 1
    deterministic: bool = False
    threads: int = 0  # of this rank; 0: as the environment says
    timeout_s: float = 600.0  # a collective that takes longer is given up
    platform: str = "auto"
    publish_dtype: str | None = None  # of published weights; none: that of training


class TrainRank:
    """Rank `rank` of `world`; ranks count tensor first, then data, then pipeline. `init_method`: where torch's ranks meet."""

    def __init__(self, setup: TrainSetup, rank: int, world: int, init_method: str) -> None:
        self.setup, self.rank, self.world = setup, rank, world
        self.platform = prepare_process(setup)
        join(setup, rank, world, init_method, self.platform.collectives)
        from rlcli.engines.model import build_model, current_layout
        from rlcli.engines.optimizer import FusedAdam, Trainer
        from rlcli.engines.passes import Passes
        from rlcli.engines.train_state import Store
        from rlcli.models.load import load_hf
        from rlcli.models.registry import read_model

        self.platform.after_megatron(FusedAdam)
        self.dtype = torch_dtype(setup.dtype)
        self.spec = read_model(setup.model, tokenizer=False)
        self.layout = current_layout()
        self.model = build_model(self.spec, self.layout, self.dtype, setup.recompute, setup.deterministic)
        load_hf(self.model, self.spec, self.layout)
        self.trainer = Trainer(self.model, setup.optim, self.dtype)
        self.store = Store(self.share)
        self.passes = Passes(self.trainer.model, self.model, self.spec.vocab, setup.temperature, setup.head_chunk_tokens)
        gc.collect()
        gc.freeze()  # what stands now stays to the end: no need to look through it at every collection, which Megatron asks for at every save

    @property
    def speaks(self) -> bool:
        """This rank reports for its data parallel rank: the first tensor rank of the last stage."""
        return self.layout.is_last and self.layout.tensor_rank == 0

    @property
    def writes(self) -> bool:
        """This rank gives out weights: the first tensor and data parallel rank of each stage."""
        from megatron.core import parallel_state

        return self.layout.tensor_rank == 0 and parallel_state.get_data_parallel_rank() == 0

    def logprobs(self, batches: Sequence[MicroBatch]) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies [N] of each micro-batch under the current weights; on the last stage, elsewhere empty lists."""
        return self.passes.logprobs(batches)

    def update(self, batches: Sequence[MicroBatch], loss: Loss, lr: float) -> UpdateResult:
        """One optimizer update on the sum of `loss` over the micro-batches of all data parallel ranks; the same result on every rank.

        Without a trainable token on any rank nothing is done (`empty`). Where loss or gradient is not finite, weights and
        optimizer stay as they are (`skipped`).
        """
        started = time.monotonic()
        if self.total(trainable_tokens(batches)) == 0:
            return UpdateResult({}, 0.0, lr, skipped=False, tokens=0, micro_batches=0, seconds=time.monotonic() - started, empty=True)
        self.trainer.zero_grad()
        measured = self.passes.backward(batches, loss)
        self.trainer.reduce_grads()
        norm = self.trainer.grad_norm()
        mine = (measured.sums, measured.maxima, measured.loss, sum(batch.tokens for batch in batches), len(batches))
        reports = [report for report in self.share(mine if self.speaks else None) if report is not None]
        finite = math.isfinite(norm) and all(math.isfinite(report[2]) for report in reports)
        if finite:
            self.store.settle()  # what is being saved must not change under the writer
            self.trainer.step(lr, norm)
        return UpdateResult(
            metrics=merge([report[0] for report in reports], [report[1] for report in reports]),
            grad_norm=norm,
            lr=lr,
            skipped=not finite,
            tokens=sum(report[3] for report in reports),
            micro_batches=sum(report[4] for report in reports),
            seconds=time.monotonic() - started,
        )

    def gradients(self, batches: Sequence[MicroBatch], loss: Loss) -> dict[str, FloatArray]:
        """The whole gradient of the summed loss by HF name, in float32, before clipping: this stage's part, on ranks that give out weights."""
        from rlcli.engines.weights_out import whole_gradients

        self.trainer.zero_grad()
        self.passes.backward(batches, loss)
        self.trainer.reduce_grads(whole=True)
        named = whole_gradients(self.model, self.spec, self.layout)
        self.trainer.zero_grad()
        return {name: tensor.numpy() for name, tensor in named} if self.writes else {}

    def publish(self, version: int, folder: str) -> list[str]:
        """Write the weights for the rollout engines into the shared-memory folder of a SharedMemoryTransport; the files this rank wrote."""
        from rlcli.engines.weights import SharedMemoryTransport
        from rlcli.engines.weights_out import whole_weights

        if not self.first_replica:
            return []
        dtype = torch_dtype(self.setup.publish_dtype or self.setup.dtype)
        tensors = whole_weights(self.model, self.spec, self.layout, dtype)
        if not self.writes:
            list(tensors)  # gathering a parameter needs every tensor rank
            return []
        return SharedMemoryTransport(folder).publish(version, tensors, writer=self.rank)

    @property
    def first_replica(self) -> bool:
        """This rank belongs to the first of the data parallel copies of the model."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank() == 0

    def save(self, folder: str | Path, asynchronous: bool = False, optimizer: bool = True) -> None:
        """Write model and optimizer into `folder`, which exists; loads at any layout. asynchronous: returns at once, and the next update waits until its state is written."""
        self.store.save(self.model, self.trainer, Path(folder), asynchronous, optimizer)

    def save_finished(self, wait: bool = False) -> bool:
        """Whether the last save is on disk, on every rank; `wait`: return only then. Raises what the writing raised."""
        return self.store.finished(wait)

    def load(self, folder: str | Path, optimizer: bool = True) -> None:
        """Set model and optimizer to what `save` wrote, at whatever layout it was."""
        self.store.load(self.model, self.trainer, Path(folder), optimizer)

    def export(self, folder: str | Path) -> None:
        """Write an HF folder that transformers and vLLM load as it is; every rank calls this, those that give out weights write."""
        from rlcli.engines.weights_out import whole_weights
        from rlcli.models.export import HfWriter

        writer = HfWriter(self.spec, folder, self.setup.dtype)
        self.agree(writer.create if self.rank == 0 else None)
        count = 0
        if self.first_replica:
            tensors = whole_weights(self.model, self.spec, self.layout, self.dtype)
            count = writer.write(tensors if self.writes else iter(list(tensors)))  # gathering a parameter needs every tensor rank
        total = self.total(count)
        self.agree((lambda: writer.finish(total)) if self.rank == 0 else None)

    def memory(self) -> int:
        """Bytes that this rank's process holds."""
        return self.platform.memory().used

    def close(self) -> None:
        """Leave the process groups."""
        import torch.distributed as dist

        if dist.is_initialized():
            from megatron.core import parallel_state

            self.store.close()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def total(self, count: int) -> int:
        """Sum of a number over all ranks."""
        return sum(self.share(count))

    def share(self, value: Any) -> list[Any]:
        """Everybody's value, in rank order."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, action: Any) -> None:
        """Run `action` where there is one; if it fails on any rank, every rank raises that error."""
        error: Exception | None = None
        try:
            if action is not None:
                action()
        except Exception as caught:
            error = caught
        for other in self.share(error):
            if other is not None:
                raise other


def prepare_process(setup: TrainSetup) -> Any:
    """Threads, determinism and the platform's adaptations, before Megatron is imported; returns the platform."""
    import torch

    from rlcli.platforms.base import pick

    for module in (r"megatron\.core", r"torch\.distributed"):  # they warn of what is missing or deprecated, once a rank, to no end here
        warnings.filterwarnings("ignore", module=module)
    if setup.threads:
        torch.set_num_threads(setup.threads)
    if setup.deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
    platform = pick(setup.platform)
    platform.before_megatron()
    return platform


def join(setup: TrainSetup, rank: int, world: int, init_method: str, backend: str) -> None:
    """Meet the other ranks and make Megatron's process groups; UserError where the sizes do not multiply out."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    model_ranks = setup.parallel.tensor * setup.parallel.pipeline
    if world % model_ranks:
        raise UserError(
            f"parallel.devices={world} is no multiple of parallel.tensor={setup.parallel.tensor} x parallel.pipeline={setup.parallel.pipeline}"
        )
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timedelta(seconds=setup.timeout_s))
    parallel_state.initialize_model_parallel(
        setup.parallel.tensor, setup.parallel.pipeline, distributed_timeout_minutes=max(1, math.ceil(setup.timeout_s / 60))
    )
    tensor_parallel.model_parallel_cuda_manual_seed(setup.seed)


def torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def trainable_tokens(batches: Sequence[MicroBatch]) -> int:
    """Response tokens that the loss counts: all of them, or those with a weight other than 0 where the rows have weights."""
    count = 0
    for row in (row for batch in batches for row in batch.rows):
        counted = row.fields.get("weight", row.responses)
        count += sum(int(np.count_nonzero(values)) if "weight" in row.fields else len(values) for values in counted)
    return count


def merge(sums: list[dict[str, float]], maxima: list[dict[str, float]]) -> dict[str, float]:
    """Metrics over data parallel ranks: sums added up, of maxima the largest."""
    out: dict[str, float] = {}
    for part in sums:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    for part in maxima:
        for name, value in part.items():
            out[name] = max(out.get(name, value), value)
    return out
