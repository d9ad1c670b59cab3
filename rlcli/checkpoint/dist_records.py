"""What a torch_dist checkpoint is made of when it is written: records of torch.save in files, and the description of where each lies."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlcli.checkpoint import disk
from rlcli.checkpoint.dist_format import COMMON, CONFIG, METADATA
from rlcli.checkpoint.unpickle import load_plain


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and where it lies: a box of a whole tensor or, without a dtype, an object."""

    key: str
    file: str
    start: int
    length: int
    dtype: str | None = None
    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()


@lru_cache(maxsize=4096)
def frame(size: tuple[int, ...], dtype: str) -> tuple[bytes, bytes, int]:
    """(what stands before a tensor's bytes, what after, how many they are) in the record of torch.save."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        with torch.serialization.skip_data():
            torch.save(torch.empty(size, dtype=getattr(torch, dtype)), path)
        region = load_plain(path)
        with open(path, "rb") as f:
            head = f.read(region.start)
            f.seek(region.start + region.bytes)
            return head, f.read(), region.bytes


def bytes_of(value: Any) -> bytes:
    """torch.save of `value`, as Megatron stores a shared object."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def describe(folder: Path, placed: Iterable[Placed], common: Mapping[str, Any]) -> None:
    """Write what makes the files in `folder` one checkpoint; `common` is what all ranks share and is no tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for record in placed:
        place = _StorageInfo(record.file, record.start, record.length)
        if record.dtype is None:
            described[record.key] = BytesStorageMetadata()
            stored[MetadataIndex(record.key)] = place
        else:
            stored[_add_chunk(described, record)] = place
    metadata = Metadata(described, None, stored, StorageMeta(), "1.0.0")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    disk.write_file(folder / COMMON, bytes_of(dict(common)))
    disk.write_file(folder / METADATA, pickle.dumps(metadata))
    disk.write_file(folder / CONFIG, json.dumps(config).encode())


def _add_chunk(described: dict[str, Any], record: Placed) -> Any:
    """Add a box to the description of its tensor; the index that names it."""
    import torch
    from torch.distributed.checkpoint import metadata as m

    if record.key not in described:
        described[record.key] = m.TensorStorageMetadata(m.TensorProperties(dtype=getattr(torch, record.dtype or "")), torch.Size(record.whole), [])
    chunks, offset = described[record.key].chunks, torch.Size(record.offset)
    chunks.append(m.ChunkStorageMetadata(offset, torch.Size(record.size)))
    return m.MetadataIndex(record.key, offset, len(chunks) - 1)
