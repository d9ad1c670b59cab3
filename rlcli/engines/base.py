"""The two engines as the trainers see them. Each has one real implementation: Megatron-core trains, vLLM generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlcli.types import FloatArray, Int32Array, Sample, TrainRow


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy."""

    samples: int  # responses a prompt
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None  # given: every request has its own seed made of this and its number


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to sample from; `key` comes back with its samples."""

    key: int
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Where the weights of one version lie for the rollout engines: files in shared memory, one or more for each writer."""

    version: int
    files: tuple[str, ...]
    tied_head: bool


@dataclass(slots=True)
class UpdateResult:
    """What one optimizer update did. Metrics are sums as the loss gave them, over all micro-batches and ranks."""

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool  # not finite: the weights are as they were
    tokens: int  # tokens computed forward and backward, over all ranks
    micro_batches: int
    seconds: float
    empty: bool = False  # there was no trainable token: nothing was done


class TrainEngine(Protocol):
    """Megatron-core over all training ranks; called by the driver."""

    what: str  # the step and stage that messages name; the trainer sets it

    @property
    def data_parallel(self) -> int:
        """Into how many shares the rows of an update are parted."""
        ...

    def logprobs(self, rows: Sequence[TrainRow]) -> tuple[list[list[FloatArray]], list[list[FloatArray]]]:
        """Log-probs and entropies of the response tokens under the current weights, shaped like `rows[i].responses`."""
        ...

    def update(self, rows: Sequence[TrainRow], loss: Any, lr: float) -> UpdateResult:
        """One optimizer update on the sum of `loss` over all rows."""
        ...

    def publish(self, version: int, folder: Path) -> list[str]:
        """Write the weights for the rollout engines; the files of all writers, in rank order."""
        ...

    def save(self, folder: Path, asynchronous: bool = False, optimizer: bool = True) -> None:
        """Write model and optimizer; asynchronous: returns once training may go on, and `saved` says when it is on disk."""
        ...

    def saved(self, wait: bool) -> bool:
        """Whether the asynchronous save is on disk, on every rank; `wait`: return only then. Raises what the writing raised."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Write an HF folder that transformers and vLLM load as it is."""
        ...


class RolloutEngine(Protocol):
    """vLLM over all rollout engines; called by the driver."""

    def generate(self, requests: Iterable[Request], sampling: Sampling, stop: Callable[[], bool] | None = None) -> Iterator[tuple[int, list[Sample]]]:
        """Yield (key, samples) of each prompt as soon as all its samples are finished; when `stop()` is true the rest is aborted."""
        ...

    def score(self, sequences: Sequence[tuple[Int32Array, Int32Array]]) -> list[FloatArray]:
        """Log-probs of the second part's tokens after the first, by the rollout engine."""
        ...

    def update_weights(self, handle: WeightHandle) -> None: ...
