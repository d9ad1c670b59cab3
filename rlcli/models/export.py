"""Writing a HF folder that transformers and vLLM load as it is: several ranks may write their tensors into it at once."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import RunError, UserError
from rlcli.models.files import BYTES, FLOATS, INDEX, make_header, tensor_bytes
from rlcli.models.spec import ModelSpec
from rlcli.models.unfinished import MARK, WHOLE

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 5_000_000_000
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json", "LICENSE", "additional_chat_templates",
)


class HfWriter:
    """A HF folder in the making, at `folder`.partial until `finish` renames it.

    Sizes and places of all tensors are known beforehand, so each is written to its place as it comes, in any order and by any process
    that sees the folder: one calls `create`, then all call `write`, then (all done) the first calls `finish`.
    """

    def __init__(
        self, spec: ModelSpec, folder: str | Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES, dtypes: dict[str, str] | None = None
    ) -> None:
        """`dtype` is torch's name of what weights are stored as ("bfloat16"); None: as `dtypes` says by HF name, or as in the source folder."""
        self.spec, self.folder, self.dtype = spec, Path(folder), dtype
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        codes = {v: k for k, v in FLOATS.items()}
        sources = [s for rule in spec.rules if not rule.copy for s in rule.sources]
        if dtypes is not None:
            self.code = {s.name: codes[dtypes[s.name]] for s in sources}
        else:
            self.code = {s.name: codes[dtype] if dtype else spec.tensors[s.name].dtype for s in sources}
        self.shape = {s.name: s.shape for s in sources}
        self.shards = _split({n: math.prod(self.shape[n]) * BYTES[self.code[n]] for n in self.shape}, shard_bytes)
        self.places: dict[str, tuple[str, int, int]] = {}
        self._heads: dict[str, bytes] = {}
        for file, names in self.shards.items():
            self._heads[file], places = make_header((n, self.code[n], self.shape[n]) for n in names)
            self.places |= {n: (file, low, high) for n, (low, high) in places.items()}

    @property
    def bytes(self) -> int:
        """Size of all shards together."""
        return sum(max((self.places[n][2] for n in names), default=0) for names in self.shards.values())

    def create(self) -> None:
        """Make the folder with all but the weights' data; UserError where `folder` exists or the disk is too full."""
        if self.folder.exists():
            raise UserError(f"{self.folder}: exists already; choose another folder or remove it")
        parent = self.folder.resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < self.bytes:
            raise UserError(f"{parent}: {self.bytes / 2**30:.1f} GiB are needed for the model, {free / 2**30:.1f} GiB are free")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        (self.partial / MARK).touch()
        self.lay_out()

    def lay_out(self) -> None:
        """Every file of the folder, the weights' data still zeros, into `partial`, which exists."""
        for file, names in self.shards.items():
            with open(self.partial / file, "wb") as f:
                f.write(self._heads[file])
                f.truncate(max((self.places[n][2] for n in names), default=len(self._heads[file])))
        self._companions()

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write each (hf_name, tensor) to its place, converted to the stored dtype; returns how many there were."""
        import torch

        count = 0
        handles: dict[str, int] = {}
        try:
            for name, tensor in tensors:
                if name not in self.places or tuple(tensor.shape) != self.shape[name]:
                    raise RunError(f"{self.folder}: {name} {list(tensor.shape)} has no place in a {self.spec.family.name} model")
                file, low, _ = self.places[name]
                if file not in handles:
                    handles[file] = os.open(self.partial / file, os.O_WRONLY)
                _pwrite(handles[file], tensor_bytes(tensor.detach().to("cpu", getattr(torch, FLOATS[self.code[name]]))), low)
                count += 1
            for handle in handles.values():
                os.fsync(handle)
        finally:
            for handle in handles.values():
                os.close(handle)
        return count

    def finish(self, count: int) -> None:
        """Rename the folder to its name, once all of `count` tensors are written; RunError where some are missing."""
        if count != len(self.places):
            raise RunError(f"{self.folder}: {count} tensors were written where the model has {len(self.places)}; left at {self.partial}")
        (self.partial / MARK).write_text(WHOLE, encoding="utf-8")
        os.rename(self.partial, self.folder)
        (self.folder / MARK).unlink()
        _sync_folder(self.folder.resolve().parent)

    def _companions(self) -> None:
        """Everything beside the weights: index, config.json with the stored dtype, generation config, tokenizer, chat template."""
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": sum(high - low for _, low, high in self.places.values())},
                     "weight_map": {n: self.places[n][0] for n in sorted(self.places)}}
            _write_json(self.partial / INDEX, index)
        config = dict(self.spec.config)
        if self.dtype:
            config["dtype" if "dtype" in config else "torch_dtype"] = self.dtype
        _write_json(self.partial / "config.json", config)
        for name in COMPANIONS:
            source = self.spec.folder / name
            if source.is_dir():
                shutil.copytree(source, self.partial / name)
            elif source.is_file():
                shutil.copyfile(source, self.partial / name)


def export_hf(spec: ModelSpec, folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str | None = None) -> None:
    """Write a whole HF folder from one process. `tensors` in any order, every one of the model once."""
    writer = HfWriter(spec, folder, dtype)
    writer.create()
    writer.finish(writer.write(tensors))


def _split(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """File name -> tensor names, files no larger than `most` unless one tensor is."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > most:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files)}


def _pwrite(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data[: 2**30], offset)
        data, offset = data[written:], offset + written


def _write_json(path: Path, value: object) -> None:
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
