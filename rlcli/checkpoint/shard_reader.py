"""What a rank holds of a torch_dist checkpoint, read straight to where it lies: the counterpart of shard_writer.

Whatever layout wrote the checkpoint, a box of a tensor is put together from the chunks that reach into it, which are mapped, not loaded. So a rank
needs no memory beside its own share; Megatron's loader has every data parallel rank hold the whole optimizer state of its model shard for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlcli.checkpoint.dist_format import METADATA, Records, read_metadata
from rlcli.checkpoint.regions import read_region
from rlcli.checkpoint.shard_writer import Piece
from rlcli.errors import RunError

Box = tuple[slice, ...]


class ShardReader:
    """Fills pieces from the checkpoint in `folder`. Raises UserError where it is no torch_dist checkpoint, or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries, self.records = folder, read_metadata(folder), Records(folder)

    def fill(self, piece: Piece, padded: bool = False) -> None:
        """Set the elements of `piece.data` to those stored in its box; `padded`: what lies beyond the stored tensor becomes zero.

        Raises RunError where the checkpoint holds no such tensor, one of another shape, or not all of the box.
        """
        entry = self.entries.get(piece.key)
        if entry is None:
            raise RunError(f"{self.folder}: holds no {piece.key}")
        if entry.shape[1:] != piece.whole[1:] or (entry.shape[:1] != piece.whole[:1] and not padded):
            raise RunError(f"{self.folder}: {piece.key} is {list(entry.shape)}, where this model has {list(piece.whole)}")
        target, filled = piece.data.view(piece.size), 0
        wanted = math.prod(n if axis else max(0, min(n, entry.shape[0] - piece.offset[0])) for axis, n in enumerate(piece.size))
        if wanted < target.numel():
            target.zero_()
        for chunk in entry.reaching(piece.offset[: piece.lead]):
            boxes = overlap(piece.offset, piece.size, chunk.offsets, chunk.sizes)
            if boxes:
                into, part = boxes
                target[into].copy_(read_region(self.records.region(chunk, entry))[part])
                filled += target[into].numel()
        if filled != wanted:
            raise RunError(f"{self.folder}: {METADATA} places {filled} of the {wanted} values of {piece.key} that this rank needs")


def overlap(first: Sequence[int], size: Sequence[int], second: Sequence[int], other: Sequence[int]) -> tuple[Box, Box] | None:
    """Where two boxes of one tensor, given by corner and size, meet: as slices of the first and of the second; None where they do not."""
    into: list[slice] = []
    part: list[slice] = []
    for a, n, b, m in zip(first, size, second, other, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        into.append(slice(low - a, high - a))
        part.append(slice(low - b, high - b))
    return tuple(into), tuple(part)
