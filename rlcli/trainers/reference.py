"""Log-probs of the reference model: computed once by the training engine itself, and kept beside the prepared data.

A cache belongs to exactly one set of rows, weights and arithmetic; its folder is named by a digest of them. It is written in parts, so
that a computation that was broken off goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rlcli.cluster.launch import LocalCluster
from rlcli.engines.train_group import TrainGroup
from rlcli.errors import RunError
from rlcli.trainers.pair_rows import Pairs
from rlcli.types import FloatArray, TrainRow

PART_PAIRS = 64  # pairs computed and written together
FORM = 1  # raised when the files' form changes

Scores = list[list[FloatArray]]  # by pair: chosen and rejected, each [T]


def weights_digest(folder: Path) -> str:
    """SHA-256 over a model's configuration and all its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def cache_key(pairs: Pairs, weights: str, dtype: str) -> str:
    """Names one cache: the rows as they are trained on (truncation included), the reference's weights, the arithmetic."""
    return hashlib.sha256(json.dumps([FORM, pairs.fingerprint, weights, dtype]).encode()).hexdigest()[:32]


class ReferenceCache:
    """Reference log-probs of all pairs of one data set, in parts of `PART_PAIRS` pairs."""

    def __init__(self, pairs: Pairs, weights: str, dtype: str) -> None:
        self.pairs = pairs
        self.folder = pairs.source.folder / f"reference-{cache_key(pairs, weights, dtype)}"
        self._parts: dict[int, FloatArray] = {}
        self.computed = 0  # pairs that `fill` had to compute

    @property
    def parts(self) -> int:
        return -(-len(self.pairs) // PART_PAIRS)

    def missing(self) -> list[int]:
        return [part for part in range(self.parts) if not self._file(part).is_file()]

    def fill(self, logprobs: Callable[[Sequence[TrainRow]], Scores], tell: Callable[[str], None]) -> None:
        """Compute the parts that are missing with `logprobs`, the engine holding the reference's weights."""
        missing = self.missing()
        if missing and len(missing) < self.parts:
            tell(f"reference log-probs: going on after {self.parts - len(missing)} of {self.parts} parts")
        for part in missing:
            numbers = self._numbers(part)
            self._write(part, logprobs(self.pairs.rows(numbers)))
            self.computed += len(numbers)

    def scores(self, numbers: Sequence[int], rows: Sequence[TrainRow]) -> Scores:
        """Log-probs of some pairs, shaped like their rows' responses."""
        out = []
        for number, row in zip(numbers, rows, strict=True):
            part, place = divmod(number, PART_PAIRS)
            values, starts = self._part(part)
            start, pair = int(starts[place]), []
            for response in row.responses:
                pair.append(values[start : start + len(response)])
                start += len(response)
            if start != int(starts[place + 1]):
                raise RunError(f"{self._file(part)}: does not fit pair {number}; delete the folder {self.folder}, it is made anew")
            out.append(pair)
        return out

    def _numbers(self, part: int) -> range:
        return range(part * PART_PAIRS, min((part + 1) * PART_PAIRS, len(self.pairs)))

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.npz"

    def _write(self, part: int, scores: Scores) -> None:
        lengths = [sum(len(answer) for answer in pair) for pair in scores]
        values = np.concatenate([answer for pair in scores for answer in pair]).astype(np.float32)
        beside = self.folder / f".part-{part:06d}.npz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as stream:
                np.savez(stream, values=values, starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(self._file(part))
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise RunError(f"reference log-probs cannot be written to {self.folder}: {error.strerror}; use dpo.reference=live, or a data folder that can be written") from error

    def _part(self, part: int) -> tuple[FloatArray, FloatArray]:
        if part not in self._parts:
            with np.load(self._file(part), allow_pickle=False) as loaded:
                self._parts[part] = (loaded["values"], loaded["starts"])  # type: ignore[assignment]
        return self._parts[part]  # type: ignore[return-value]


@contextmanager
def reference_ranks(cluster: LocalCluster, make: Callable[[], TrainGroup], timeout_s: float) -> Iterator[TrainGroup]:
    """Training ranks that hold the reference, for as long as they are needed."""
    group = make()
    try:
        group.build(timeout_s)
        yield group
    finally:
        for worker in group.workers:
            worker.kill()
            cluster.workers.remove(worker)
        cluster.pulse.forget()
