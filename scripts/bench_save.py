"""Speed of saving a checkpoint: against the disk's plain sequential write, and how long training stands still, both in one run.

    python scripts/bench_save.py --model HF_FOLDER [--folder ON_THE_DISK_TO_MEASURE]

A checkpoint holds the weights in bfloat16, the float32 master weights and Adam's two moments: 14 bytes a parameter. It counts as saved once every
byte is on the disk, hashed, and the folder has its name. The plain write is one file of as many bytes, in large pieces, with fsync; the two take
turns, and the best of each counts. Then the same by an asynchronous save with an update of 16 prompts x 8 samples going on beside it: how long
training stands still (the call, and the update's wait before it changes what is not yet written), and the time until the checkpoint is complete.

Prints a table and, last, `ratio N.NN`: the save's bytes a second over the plain write's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_train import Shape, make_rows

from rlcli.algorithms.dapo import DapoLoss
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.store import Store
from rlcli.data.pack import pack
from rlcli.engines.train import TrainRank, TrainSetup

PIECE = bytes(os.urandom(8 << 20))


def plain_write(path: Path, size: int) -> float:
    """Seconds to write and flush one file of `size` bytes."""
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(PIECE)):
            file.write(PIECE)
        file.write(PIECE[: size % len(PIECE)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


class Waiting:
    """Seconds that updates have waited for a save."""

    def __init__(self, rank: TrainRank) -> None:
        self.seconds, self.settle = 0.0, rank.store.settle
        rank.store.settle = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        started = time.perf_counter()
        self.settle()
        self.seconds += time.perf_counter() - started


def saved(rank: TrainRank, store: Store, step: int, update: Callable[[], float] | None) -> tuple[float, float, int]:
    """(seconds that training stands still, seconds until the checkpoint is complete, its bytes); asynchronous where there is an `update`."""
    started = time.perf_counter()
    folder = store.begin(step) / "model"
    folder.mkdir()
    rank.save(folder, update is not None)
    manifest = Manifest("dapo", step)
    if update is None:
        store.finish(step, manifest)
        seconds = time.perf_counter() - started
        return seconds, seconds, manifest.bytes()
    still = time.perf_counter() - started + update()
    while not rank.save_finished():  # as the loop does it, once a step
        time.sleep(0.05)
    resumed = time.perf_counter()
    store.finish_later(step, manifest)
    still += time.perf_counter() - resumed
    store.wait()
    return still, time.perf_counter() - started, manifest.bytes()


def measure(model: str, folder: Path, repeats: int) -> float:
    """Print the table; the ratio."""
    rank = TrainRank(TrainSetup(model=model), 0, 1, f"file://{folder / 'meeting'}")
    batches = pack(make_rows(Shape(16, 90, 8, 7), rank.spec.vocab), 1, 8192, "auto")[0]
    waiting = Waiting(rank)

    def update() -> float:
        before = waiting.seconds
        rank.update(batches, DapoLoss(old_is_current=True), 1e-6)
        return waiting.seconds - before

    update()
    plain, synchronous, still, whole = [], [], [], []
    with Store(folder / "checkpoints", keep_last=1) as store:
        size = saved(rank, store, 0, None)[2]  # the first makes what later ones reuse
        for turn in range(repeats):
            plain.append(plain_write(folder / "plain", size))
            synchronous.append(saved(rank, store, 2 * turn + 1, None)[0])
            pause, end, _ = saved(rank, store, 2 * turn + 2, update)
            still.append(pause)
            whole.append(end)
    started = time.perf_counter()
    rank.load(folder / "checkpoints" / f"step-{2 * repeats:08d}" / "model")
    loading = time.perf_counter() - started
    rank.close()
    gigabytes = size / 1e9
    print(f"{'':34s}{'seconds':>9s}{'GB/s':>8s}   ({gigabytes:.2f} GB, best of {repeats})")
    for name, seconds in (("plain sequential write", plain), ("synchronous save, to the disk", synchronous), ("asynchronous, beside an update", whole)):
        print(f"{name:34s}{min(seconds):9.2f}{gigabytes / min(seconds):8.2f}")
    print(f"{'loading it, read a moment ago':34s}{loading:9.2f}{gigabytes / loading:8.2f}")
    share = min(still) / min(synchronous)
    print(f"{'training stands still, asynchronous':34s}{min(still):8.2f}   {share:.1%} of the synchronous save (aim: under 10 %)")
    return min(plain) / min(synchronous)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; by default the system's folder for temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="msrl-bench-", dir=args.folder))
    try:
        ratio = measure(args.model, folder, args.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
