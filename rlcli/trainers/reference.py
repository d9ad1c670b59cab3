"""Log-probs of the reference model: computed once by the training engine itself, and kept beside the prepared data.

A cache belongs to exactly one set of rows, weights and arithmetic; its folder is named by a digest of them. It is written in parts, so
that a computation that was broken off goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.cluster.launch import LocalCluster
from rlcli.engines.train_group import TrainGroup
from rlcli.errors import RunError, StoppedEarly, UserError
from rlcli.trainers.pair_rows import Pairs
from rlcli.types import FloatArray, TrainRow

PART_PAIRS = 64  # pairs computed and written together
PARTS_IN_MEMORY = 512
TELL_EVERY_S = 60.0
FORM = 2  # raised when the files' form changes

Scores = list[list[FloatArray]]  # by pair: chosen and rejected, each [T]


def weights_digest(folder: Path) -> str:
    """A digest of a model's configuration and of all its weights, files read side by side."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    with ThreadPoolExecutor(min(8, len(files))) as threads:
        digests = list(threads.map(_file_digest, files))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def cache_key(pairs: Pairs, weights: str, *arithmetic: Any) -> str:
    """Names one cache: the rows as they are trained on (truncation included), the reference's weights, the arithmetic."""
    return hashlib.sha256(json.dumps([FORM, pairs.fingerprint, weights, *arithmetic]).encode()).hexdigest()[:32]


class ReferenceCache:
    """Reference log-probs of all pairs of one data set, in parts of `PART_PAIRS` pairs.

    weights: `weights_digest` of the reference. arithmetic: whatever else its log-probs depend on, as JSON values.
    Raises UserError where something is missing, and the folder cannot be written: before anything is computed.
    """

    def __init__(self, pairs: Pairs, weights: str, *arithmetic: Any) -> None:
        self.pairs = pairs
        self.folder = pairs.source.folder / f"reference-{cache_key(pairs, weights, *arithmetic)}"
        self._parts: OrderedDict[int, tuple[FloatArray, Any]] = OrderedDict()
        if self.missing():
            self._try_folder()

    @property
    def parts(self) -> int:
        return -(-len(self.pairs) // PART_PAIRS)

    def missing(self) -> list[int]:
        """Parts that are not on disk, or were not written to their end."""
        return [part for part in range(self.parts) if not zipfile.is_zipfile(self._file(part))]

    def fill(self, logprobs: Callable[[Sequence[TrainRow]], Scores], tell: Callable[[str], None], asked: Callable[[], bool] = lambda: False) -> None:
        """Compute the parts that are missing with `logprobs`, the engine holding the reference's weights, and say so.

        asked: whether to stop between two parts; raises StoppedEarly then.
        """
        missing, started = self.missing(), time.monotonic()
        told, computed = started, 0
        if missing and len(missing) < self.parts:
            tell(f"reference log-probs: going on after {self.parts - len(missing)} of {self.parts} parts")
        for part in missing:
            if asked():
                raise StoppedEarly(f"stopped while computing reference log-probs, {computed} of them new; start the run again: what is done is kept")
            numbers = self._numbers(part)
            scores = logprobs(self.pairs.rows(numbers))
            self._check_finite(numbers, scores)
            self._write(part, scores)
            computed += len(numbers)
            if time.monotonic() > told + TELL_EVERY_S:
                told = time.monotonic()
                tell(f"reference log-probs: {numbers.stop} of {len(self.pairs)} pairs")
        how = f"{computed} computed in {time.monotonic() - started:.1f} s" if computed else "all from the cache"
        tell(f"reference log-probs of {len(self.pairs)} pairs: {how} ({self.folder})")

    def scores(self, numbers: Sequence[int], rows: Sequence[TrainRow]) -> Scores:
        """Log-probs of some pairs, shaped like their rows' responses. Raises RunError where the files are not what was written."""
        out = []
        for number, row in zip(numbers, rows, strict=True):
            part, place = divmod(number, PART_PAIRS)
            values, starts = self._part(part)
            lengths = [len(response) for response in row.responses]
            if len(starts) != len(self._numbers(part)) + 1 or len(values) != starts[-1] or starts[place + 1] - starts[place] != sum(lengths):
                raise self._damaged(part, f"does not fit pair {number}")
            first = int(starts[place])
            out.append([values[first : first + lengths[0]], values[first + lengths[0] : first + sum(lengths)]])
        return out

    def _check_finite(self, numbers: range, scores: Scores) -> None:
        """Raise RunError for a reference that gives no numbers: kept, they would spoil every later run too."""
        bad = [self.pairs.numbers[number] for number, pair in zip(numbers, scores, strict=True) if not all(np.isfinite(answer).all() for answer in pair)]
        if bad:
            raise RunError(
                f"reference log-probs are not finite for {len(bad)} of {len(numbers)} pairs (the first: row {bad[0]} of {self.pairs.source.folder}): "
                "the reference's weights are damaged, or too large for train.dtype"
            )

    def _try_folder(self) -> None:
        """Raise UserError where the folder cannot be made or written."""
        try:
            self.folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise UserError(f"{self._unwritable(error)}; copy the data to a folder that can be written, or use dpo.reference=live") from error

    def _unwritable(self, error: OSError) -> str:
        return f"reference log-probs cannot be written to {self.folder}: {error.strerror}"

    def _numbers(self, part: int) -> range:
        return range(part * PART_PAIRS, min((part + 1) * PART_PAIRS, len(self.pairs)))

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.npz"

    def _write(self, part: int, scores: Scores) -> None:
        lengths = [sum(len(answer) for answer in pair) for pair in scores]
        values = np.concatenate([answer for pair in scores for answer in pair]).astype(np.float32)
        beside = self.folder / f".part-{part:06d}-{os.getpid()}.npz"  # two runs may fill the same cache
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as stream:
                np.savez(stream, values=values, starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(self._file(part))
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise RunError(f"{self._unwritable(error)}; what was written before is kept: start the run again once there is room") from error

    def _part(self, part: int) -> tuple[FloatArray, Any]:
        if part not in self._parts:
            try:
                with np.load(self._file(part), allow_pickle=False) as loaded:
                    self._parts[part] = (loaded["values"], loaded["starts"])
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                raise self._damaged(part, str(error) or type(error).__name__) from error
            if len(self._parts) > PARTS_IN_MEMORY:
                self._parts.popitem(last=False)
        self._parts.move_to_end(part)
        return self._parts[part]

    def _damaged(self, part: int, how: str) -> RunError:
        return RunError(f"{self._file(part)}: the cached reference log-probs are damaged ({how}); delete this file, and it is made anew")


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
            if worker in cluster.workers:
                cluster.workers.remove(worker)
        cluster.pulse.forget()
