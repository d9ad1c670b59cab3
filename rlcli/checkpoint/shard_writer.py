"""One rank's part of a torch_dist checkpoint, written straight from its tensors by a thread: no copy of them, no second process.

The tensors must stay as they are until `settle` returns: an update waits for that, all else goes on.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcli.checkpoint import disk
from rlcli.checkpoint.dist_records import Placed, bytes_of, frame

SLICE = 16 << 20  # bytes handed to the system at once


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor: `data` holds its elements in row order, whatever its own shape."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    data: torch.Tensor
    lead: int = 0  # first axes along which layers or experts are stacked; the box has one place on each


def runs(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Elements [start, stop) of a tensor in row order, as boxes: (corner, size, number of the first element)."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape), start
        return
    row = math.prod(shape[1:])
    while start < stop:
        at, within = divmod(start, row)
        if within or stop - start < row:  # a part of one row
            end = min(stop, (at + 1) * row)
            for corner, size, number in runs(within, within + end - start, shape[1:]):
                yield (at, *corner), (1, *size), at * row + number
        else:
            count = (stop - start) // row
            end = start + count * row
            yield (at, *(0,) * (len(shape) - 1)), (count, *shape[1:]), start
        start = end


class ShardWriter:
    """Writes `pieces`, and `objects` by their full name, into a new file; begins at once."""

    def __init__(self, path: Path, pieces: Sequence[Piece], objects: Mapping[str, Any]) -> None:
        self.path, self.placed, self.error = path, list[Placed](), None
        self._settled, self._done = threading.Event(), threading.Event()
        records = {key: bytes_of(value) for key, value in objects.items()}
        threading.Thread(target=self._run, args=(list(pieces), records), name="checkpoint writer", daemon=True).start()

    error: BaseException | None  # what went wrong, once it is done

    def settle(self) -> None:
        """Return when the tensors may change."""
        self._settled.wait()

    def done(self, wait: bool = False) -> bool:
        """Whether the file is whole and on the disk, or will never be."""
        return self._done.wait(None if wait else 0)

    def _run(self, pieces: list[Piece], objects: dict[str, bytes]) -> None:
        try:
            with disk.named("write", self.path), open(self.path, "wb", buffering=0) as out:
                for data in self._records(pieces, objects):
                    write_all(out.fileno(), data)
                self._settled.set()
                os.fsync(out.fileno())
        except BaseException as error:
            self.error = error
        finally:
            self._settled.set()
            self._done.set()

    def _records(self, pieces: list[Piece], objects: dict[str, bytes]) -> Iterator[memoryview]:
        """The file's bytes in order; notes where each record lies."""
        at = 0
        for piece in pieces:
            dtype = str(piece.data.dtype).removeprefix("torch.")
            head, tail, size = frame(piece.size, dtype)
            length = len(head) + size + len(tail)
            self.placed.append(Placed(piece.key, self.path.name, at, length, dtype, piece.whole, piece.offset, piece.size))
            at += length
            yield from (memoryview(head), raw_bytes(piece.data), memoryview(tail))
        for key, record in objects.items():
            self.placed.append(Placed(key, self.path.name, at, len(record)))
            at += len(record)
            yield memoryview(record)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row order; the tensor's own memory where it lies on the host in that order."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_all(handle: int, data: memoryview) -> None:
    """Write everything, in slices: the interpreter's lock is free during each, and other threads get it in between."""
    at = 0
    while at < len(data):
        at += os.write(handle, data[at : at + SLICE])
