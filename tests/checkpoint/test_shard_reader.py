"""Any box of a stored tensor, however it was cut when it was written; what a checkpoint lacks is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlcli.checkpoint.dist_records import describe
from rlcli.checkpoint.shard_reader import ShardReader, overlap
from rlcli.checkpoint.shard_writer import Piece, ShardWriter, runs
from rlcli.errors import RunError, UserError

STACKED = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)  # four layers of [6, 5]
PLAIN = torch.arange(7 * 3, dtype=torch.float32).view(7, 3)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Written by two ranks that own runs of each layer's elements, cut in the middle of a row, and of the plain tensor."""
    ranks: list[list[Piece]] = [[], []]
    for layer in range(4):
        for rank, (start, stop) in enumerate([(0, 13), (13, 30)]):
            for corner, size, number in runs(start, stop, (6, 5)):
                data = STACKED[layer].reshape(-1)[number : number + size[0] * size[1]]
                ranks[rank].append(Piece("stacked", (4, 6, 5), (layer, *corner), (1, *size), data))
    ranks[0].append(Piece("plain", (7, 3), (0, 0), (4, 3), PLAIN[:4]))
    ranks[1].append(Piece("plain", (7, 3), (4, 0), (3, 3), PLAIN[4:]))
    ranks[1].append(Piece("half", (4, 2), (0, 0), (2, 2), torch.ones(2, 2)))
    writers = [ShardWriter(tmp_path / f"__{rank}_0.distcp", pieces, {}) for rank, pieces in enumerate(ranks)]
    assert all(writer.done(wait=True) and writer.error is None for writer in writers)
    describe(tmp_path, [record for writer in writers for record in writer.placed], {})
    return tmp_path


def read(folder: Path, key: str, whole: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], padded: bool = False, lead: int = 0) -> torch.Tensor:
    data = torch.full(size, float("nan"))
    ShardReader(folder).fill(Piece(key, whole, offset, size, data, lead), padded)
    return data


def test_every_box_of_a_layer(stored: Path) -> None:
    """All boxes of one layer, of other layouts than it was written with: rows, columns, parts of a row."""
    for top in range(6):
        for bottom in range(top + 1, 7):
            for left, right in ((0, 5), (1, 4), (3, 5)):
                for lead in (0, 1):  # whether it is known that layers are stacked, or not
                    found = read(stored, "stacked", (4, 6, 5), (2, top, left), (1, bottom - top, right - left), lead=lead)
                    assert torch.equal(found[0], STACKED[2, top:bottom, left:right])


def test_boxes_over_several_layers_and_of_plain_tensors(stored: Path) -> None:
    assert torch.equal(read(stored, "stacked", (4, 6, 5), (1, 0, 0), (3, 6, 5)), STACKED[1:])
    assert torch.equal(read(stored, "plain", (7, 3), (2, 1), (4, 2)), PLAIN[2:6, 1:])


def test_what_torch_writes(tmp_path: Path) -> None:
    dcp.save({"plain": PLAIN.clone()}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert torch.equal(read(tmp_path, "plain", (7, 3), (1, 0), (5, 3)), PLAIN[1:6])


def test_a_padded_vocabulary_of_another_size(stored: Path) -> None:
    found = read(stored, "plain", (10, 3), (5, 0), (5, 3), padded=True)
    assert torch.equal(found[:2], PLAIN[5:])
    assert torch.equal(found[2:], torch.zeros(3, 3))
    assert torch.equal(read(stored, "plain", (10, 3), (8, 0), (2, 3), padded=True), torch.zeros(2, 3))
    assert torch.equal(read(stored, "plain", (5, 3), (3, 0), (2, 3), padded=True), PLAIN[3:5])


@pytest.mark.parametrize(("key", "whole", "size", "padded", "words"), [
    ("other", (7, 3), (7, 3), False, "holds no other"),
    ("plain", (8, 3), (8, 3), False, r"plain is \[7, 3\], where this model has \[8, 3\]"),
    ("plain", (7, 4), (7, 4), True, r"plain is \[7, 3\], where this model has \[7, 4\]"),
    ("half", (4, 2), (4, 2), False, "places 4 of the 8 values of half"),
])
def test_what_a_checkpoint_lacks(key: str, whole: tuple[int, ...], size: tuple[int, ...], padded: bool, words: str, stored: Path) -> None:
    with pytest.raises(RunError, match=words):
        read(stored, key, whole, (0,) * len(size), size, padded)


def test_a_file_that_is_gone(stored: Path) -> None:
    (stored / "__1_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__1_0\.distcp: file is missing"):
        ShardReader(stored)


def test_where_boxes_meet() -> None:
    assert overlap((2, 0), (3, 4), (4, 1), (5, 2)) == ((slice(2, 3), slice(1, 3)), (slice(0, 1), slice(0, 2)))
    assert overlap((0,), (4,), (4,), (2,)) is None
    assert overlap((), (), (), ()) == ((), ())
