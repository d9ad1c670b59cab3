"""Writing Megatron's distributed checkpoints: every tensor is one record of torch.save in one file, laid out first and filled in as it comes."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from rlcli.checkpoint.dist_format import COMMON, CONFIG, METADATA, Key, keys_of
from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.target import HF_FOLDER, Slot, Target, copy_companions
from rlcli.checkpoint.unpickle import load_plain
from rlcli.models.rules import Rule, padded

DATA = "__0_0.distcp"
# Megatron-core's linear layers without Transformer Engine save an empty "extra state", which loading asks for.
LINEAR = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
          "linear_kv_down_proj", "linear_kv_up_proj")


class DistTarget(Target):
    """Writes a torch_dist checkpoint. The layout only pads the vocabulary; the files serve any."""

    format = "torch_dist"

    def _rules(self) -> list[Rule]:
        return [rule for rule in self.spec.rules if not rule.copy]

    def _shape(self, rule: Rule) -> tuple[int, ...]:
        shape = rule.shape(1)
        return (padded(shape[0], self.layout.tensor), *shape[1:]) if rule.order == "padded" else shape

    def bytes(self) -> int:
        return sum(Region(self.folder, self.dtype_of(r), self._shape(r), 0).bytes for r in self._rules())

    def prepare(self) -> None:
        import torch
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        self.described: dict[str, Any] = {}
        self.stored: dict[Any, Any] = {}
        at = 0
        with open(self.partial / DATA, "wb") as f, tempfile.TemporaryDirectory(dir=self.partial) as scratch:
            for rule in self._rules():
                key, shape = keys_of(rule, self.spec)[0], self._shape(rule)
                head, tail, size = _record(Path(scratch) / "record", torch.empty(*(1,) * len(key.index), *shape, dtype=getattr(torch, self.dtype_of(rule))))
                f.seek(at)
                f.write(head)
                f.seek(at + len(head) + size)
                f.write(tail)
                region = Region(self.partial / DATA, self.dtype_of(rule), shape, at + len(head))
                self.slots[rule.name] = [Slot(region, 1, 0)]
                length = len(head) + size + len(tail)
                self._describe(key, shape, self.dtype_of(rule), at, length)
                at += length
            for name in self._extra_states():
                record = _bytes_of([None])
                f.write(record)
                self.described[name] = BytesStorageMetadata()
                self.stored[MetadataIndex(name)] = _place(at, len(record))
                at += len(record)

    def _describe(self, key: Key, shape: tuple[int, ...], dtype: str, at: int, length: int) -> None:
        import torch
        from torch.distributed.checkpoint import metadata as m

        size = torch.Size((*key.counts, *shape))
        if key.name not in self.described:
            self.described[key.name] = m.TensorStorageMetadata(m.TensorProperties(dtype=getattr(torch, dtype)), size, [])
        offsets = torch.Size((*key.index, *(0,) * len(shape)))
        chunks = self.described[key.name].chunks
        chunks.append(m.ChunkStorageMetadata(offsets, torch.Size((*(1,) * len(key.index), *shape))))
        self.stored[m.MetadataIndex(key.name, offsets, len(chunks) - 1)] = _place(at, length)

    def _extra_states(self) -> list[str]:
        names = []
        for rule in self._rules():
            key = keys_of(rule, self.spec)[0]
            module, _, last = key.name.rpartition(".")
            if last == "weight" and module.rpartition(".")[2] in LINEAR:
                index, counts = (".".join(map(str, x)) for x in (key.index or (0,), key.counts or (1,)))
                names.append(f"{module}._extra_state/shard_{index}_{counts}")
        return names

    def close(self) -> None:
        import torch
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        metadata = Metadata(self.described, None, self.stored, StorageMeta(), "1.0.0")
        (self.partial / METADATA).write_bytes(pickle.dumps(metadata))
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (self.partial / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        torch.save({"iteration": self.step or 0, "checkpoint_version": 3.0}, self.partial / COMMON)
        copy_companions(self.spec, self.partial / HF_FOLDER)


def _place(offset: int, length: int) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(DATA, offset, length)


def _record(scratch: Path, tensor: Any) -> tuple[bytes, bytes, int]:
    """(what stands before a tensor's bytes, what after, how many they are) in the record of torch.save."""
    import torch

    with torch.serialization.skip_data():
        torch.save(tensor, scratch)
    region = load_plain(scratch)
    with open(scratch, "rb") as f:
        head = f.read(region.start)
        f.seek(region.start + region.bytes)
        return head, f.read(), region.bytes


def _bytes_of(value: Any) -> bytes:
    """torch.save of `value`, as Megatron stores a shared object."""
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
