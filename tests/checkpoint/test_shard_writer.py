"""A rank's file of a checkpoint: what torch reads back, when its tensors may change, and what is told when it cannot be written."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlcli.checkpoint import shard_writer
from rlcli.checkpoint.dist_records import describe
from rlcli.checkpoint.shard_writer import Piece, ShardWriter, runs
from rlcli.errors import RunError


def test_torch_reads_boxes_of_two_ranks_back_as_whole_tensors(tmp_path: Path) -> None:
    """A [5, 3] tensor cut in the middle of a row, as data parallel ranks own it, and a bfloat16 one behind a stacked axis."""
    values = torch.arange(15.0).reshape(5, 3)
    layer = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    first = [Piece("a", (5, 3), (0, 0), (2, 3), values[:2]), Piece("a", (5, 3), (2, 0), (1, 2), values[2, :2])]
    second = [Piece("a", (5, 3), (2, 2), (1, 1), values[2, 2:]), Piece("a", (5, 3), (3, 0), (2, 3), values[3:]), Piece("b", (4, 2, 3), (1, 0, 0), (1, 2, 3), layer)]
    writers = [ShardWriter(tmp_path / "__0_0.distcp", first, {"note": {"x": 1}}), ShardWriter(tmp_path / "__1_0.distcp", second, {})]
    assert all(writer.done(wait=True) and writer.error is None for writer in writers)
    describe(tmp_path, [record for writer in writers for record in writer.placed], {})
    state = {"a": torch.zeros(5, 3), "b": torch.zeros(4, 2, 3, dtype=torch.bfloat16), "note": None}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    np.testing.assert_array_equal(state["a"].numpy(), values.numpy())
    assert torch.equal(state["b"][1], layer)
    assert state["note"] == {"x": 1}


def test_tensors_are_kept_until_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, settled = threading.Event(), threading.Event()
    plain = shard_writer.write_all
    monkeypatch.setattr(shard_writer, "write_all", lambda *given: (go.wait(), plain(*given)))
    writer = ShardWriter(tmp_path / "file", [Piece("a", (4,), (0,), (4,), torch.ones(4))], {})
    threading.Thread(target=lambda: (writer.settle(), settled.set()), daemon=True).start()
    assert not settled.wait(0.2)
    assert not writer.done()
    go.set()
    assert settled.wait(10)
    assert writer.done(wait=True)


def test_a_full_disk_is_told_and_nobody_waits_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_writer.os, "write", full)
    writer = ShardWriter(tmp_path / "file", [Piece("a", (4,), (0,), (4,), torch.ones(4))], {})
    writer.settle()
    assert writer.done(wait=True)
    assert isinstance(writer.error, RunError)
    assert "the disk is full" in str(writer.error)


def test_a_run_of_elements_is_cut_into_boxes() -> None:
    """Elements 4 to 16 of [3, 2, 3]: by hand, the end of a row, its neighbour, a plane, and the start of the next."""
    assert list(runs(4, 16, (3, 2, 3))) == [((0, 1, 1), (1, 1, 2), 4), ((1, 0, 0), (1, 2, 3), 6), ((2, 0, 0), (1, 1, 3), 12), ((2, 1, 0), (1, 1, 1), 15)]
    assert list(runs(2, 2, (3,))) == []
    whole = np.arange(60).reshape(5, 4, 3)
    for start in range(0, 60, 7):
        for stop in range(start + 1, 61):
            cut = [whole[tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))].ravel() for corner, size, _ in runs(start, stop, (5, 4, 3))]
            assert np.concatenate(cut).tolist() == list(range(start, stop))
