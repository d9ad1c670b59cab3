"""All training ranks as one engine: packs rows for the data parallel ranks, and waits for all of them with a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.cluster.launch import LocalCluster
from rlcli.cluster.supervise import Worker, wait_all
from rlcli.config.schema import ParallelConfig
from rlcli.data.pack import MicroBatch, pack, unpack
from rlcli.engines.base import UpdateResult
from rlcli.types import FloatArray, TrainRow

RANK_FACTORY = "rlcli.engines.train:TrainRank"


class TrainGroup:
    """Implements `engines.base.TrainEngine` over Ray actors. Ranks are in Megatron's order: tensor, then data, then pipeline."""

    def __init__(self, cluster: LocalCluster, workers: list[Worker], parallel: ParallelConfig, setup: Any, timeout_s: float) -> None:
        self.cluster, self.workers, self.parallel, self.setup = cluster, workers, parallel, setup
        self.timeout_s = timeout_s
        self.data_parallel = len(workers) // (parallel.tensor * parallel.pipeline)
        self.what = "start"  # the step and stage, for messages

    def build(self, timeout_s: float) -> None:
        """Load the model on every rank; the first rank's node holds the rendezvous."""
        (_, address), port = self._on_first("identity"), self._on_first("free_port")
        meeting = f"tcp://{address}:{port}"
        arguments = [(self.setup, rank, len(self.workers), meeting) for rank in range(len(self.workers))]
        calls = [(worker, worker.actor.build.remote(RANK_FACTORY, *given)) for worker, given in zip(self.workers, arguments, strict=True)]
        wait_all(calls, "loading the model", timeout_s, self.cluster.pulse)

    def logprobs(self, rows: Sequence[TrainRow]) -> tuple[list[list[FloatArray]], list[list[FloatArray]]]:
        """Log-probs and entropies of the response tokens under the current weights, shaped like `rows[i].responses`."""
        packed = self._pack(rows)
        answers = self._each_data_rank("logprobs", packed)
        batches = [batch for share in packed for batch in share]
        logprobs = [values for answer in answers for values in answer[0]]
        entropies = [values for answer in answers for values in answer[1]]
        return unpack(rows, batches, logprobs), unpack(rows, batches, entropies)

    def update(self, rows: Sequence[TrainRow], loss: Any, lr: float) -> UpdateResult:
        """One optimizer update on the sum of `loss` over all rows."""
        started = time.monotonic()
        packed = self._pack(rows)
        result: UpdateResult = self._each_data_rank("update", packed, loss, lr)[0]
        result.seconds = time.monotonic() - started
        return result

    def publish(self, version: int, folder: Path) -> list[str]:
        """Write the weights for the rollout engines; the files of all writers, in rank order."""
        answers = self._call("publish", version, str(folder))
        return [file for files in answers for file in files]

    def save(self, folder: Path, asynchronous: bool = False, optimizer: bool = True) -> None:
        """Write model and optimizer; asynchronous: returns once the state is copied, and `saved` says when it is on disk."""
        self._call("save", str(folder), asynchronous, optimizer)

    def saved(self, wait: bool) -> bool:
        """Whether the asynchronous save is on disk, on every rank; `wait`: return only then. Raises what the writing raised."""
        return all(self._call("save_finished", wait))

    def load(self, folder: Path) -> None:
        self._call("load", str(folder))

    def export(self, folder: Path) -> None:
        """Write an HF folder that transformers and vLLM load as it is."""
        self._call("export", str(folder))

    def memory(self) -> list[int]:
        """Bytes that each rank's process holds."""
        return self._call("memory")

    def _pack(self, rows: Sequence[TrainRow]) -> list[list[MicroBatch]]:
        return pack(rows, self.data_parallel, self.setup.micro_batch_tokens, self.setup.prefix_sharing)

    def _data_rank(self, rank: int) -> int:
        return rank // self.parallel.tensor % self.data_parallel

    def _each_data_rank(self, method: str, packed: list[list[MicroBatch]], *arguments: Any) -> list[Any]:
        """Give every rank its data parallel share; one answer a data rank, from the first tensor rank of the last pipeline stage."""
        import ray

        shares = [ray.put(share) for share in packed]
        calls = [
            (worker, worker.actor.call.remote(method, shares[self._data_rank(rank)], *arguments)) for rank, worker in enumerate(self.workers)
        ]
        answers = wait_all(calls, self.what, self.timeout_s, self.cluster.pulse)
        last_stage = len(self.workers) - self.data_parallel * self.parallel.tensor
        return [answers[last_stage + rank * self.parallel.tensor] for rank in range(self.data_parallel)]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self.cluster.call(self.workers, "call", method, *arguments, what=self.what, timeout_s=self.timeout_s)

    def _on_first(self, method: str) -> Any:
        return self.cluster.call(self.workers[:1], method, what="start", timeout_s=self.timeout_s)[0]

