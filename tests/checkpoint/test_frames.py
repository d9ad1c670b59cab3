"""A record is taken for the like of one that was read before only where all around its tensor is the same."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from rlcli.checkpoint.frames import Frame
from rlcli.checkpoint.regions import read_region
from rlcli.checkpoint.unpickle import load_plain

SHAPE = (3, 40)


def record(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def frame(path: Path, length: int) -> Frame:
    return Frame.around(load_plain(path, 0, length), 0, length)


def test_a_record_of_the_same_kind_is_found_where_parsing_finds_it(tmp_path: Path) -> None:
    first, second = torch.randn(SHAPE), torch.randn(SHAPE)
    records = [record(first), record(second)]
    assert len(records[0]) == len(records[1])
    path = tmp_path / "a"
    path.write_bytes(b"".join(records))
    found = frame(path, len(records[0])).find(path, len(records[0]))
    assert found == load_plain(path, len(records[0]), len(records[1]))
    assert found is not None
    assert torch.equal(read_region(found), second)


@pytest.mark.parametrize("other", [
    torch.randn(SHAPE[::-1]).t(),  # the same shape, stored the other way round
    torch.randn(SHAPE[1], SHAPE[0]),
    torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(SHAPE),
])
def test_another_kind_is_parsed(other: torch.Tensor, tmp_path: Path) -> None:
    data, more = record(torch.randn(SHAPE)), record(other)
    path = tmp_path / "a"
    path.write_bytes(data + more)
    assert frame(path, len(data)).find(path, len(data)) is None


@pytest.mark.parametrize("cut", ["head", "end", "file"])
def test_a_damaged_record_is_parsed_which_names_the_damage(cut: str, tmp_path: Path) -> None:
    data = record(torch.randn(SHAPE))
    more = bytearray(record(torch.randn(SHAPE)))
    if cut == "head":
        more[10] ^= 1
    elif cut == "end":
        more[-4] ^= 1
    path = tmp_path / "a"
    path.write_bytes(data + bytes(more if cut != "file" else more[:-1]))
    assert frame(path, len(data)).find(path, len(data)) is None
    assert frame(path, len(data)).find(tmp_path / "missing", 0) is None
