"""Writing a model in any format: all places are laid out and made first, then each tensor goes to its places as it comes."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.checkpoint.regions import Region, RegionWriter
from rlcli.errors import UserError
from rlcli.models.export import COMPANIONS
from rlcli.models.files import read_json
from rlcli.models.layout import Layout
from rlcli.models.rules import PADDING, Rule, join
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

HF_FOLDER = "hf"  # within a Megatron folder: config.json and tokenizer, from which HF folders are made again


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of one shard of a parameter."""

    region: Region
    parts: int
    rank: int


@dataclass
class Target(ABC):
    """A model being written to `folder`, at `folder`.partial until `finish`. Subclasses fill `slots` in `prepare` and may add to `close`."""

    spec: ModelSpec
    layout: Layout
    folder: Path
    dtype: str  # "keep", or a torch name
    source_dtype: dict[str, str]  # rule name -> the dtype it has in the source
    step: int | None = None
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    writer: RegionWriter = field(default_factory=RegionWriter)

    format = ""

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    def dtype_of(self, rule: Rule) -> str:
        """What `rule` is stored as."""
        return self.source_dtype[rule.name] if self.dtype == "keep" or rule.buffer else self.dtype

    @abstractmethod
    def bytes(self) -> int:
        """Size of all weights in the target, repeated ones included."""

    @abstractmethod
    def prepare(self) -> None:
        """Make all files below `partial` and fill `slots`."""

    def create(self) -> None:
        """Check that the folder is free and the disk has room, then make the files."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder}: exists already and is not empty; choose another folder or remove it")
        parent = self.folder.resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < self.bytes():
            raise UserError(f"{parent}: {self.bytes() / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        self.prepare()

    def put(self, rule: Rule, tensors: list[torch.Tensor]) -> None:
        """Write every shard of `rule`, made of its HF tensors in the order of its sources."""
        by_name = {source.name: tensor for source, tensor in zip(rule.sources, tensors, strict=True)}

        def read(name: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
            return by_name[name] if axis is None else by_name[name].narrow(axis, start, stop - start)

        for slot in self.slots.get(rule.name, []):
            if slot.region.transposed:
                self.writer.write(slot.region, join(rule, slot.parts, slot.rank, read))
            else:
                self._put_rows(rule, slot, tensors)

    def _put_rows(self, rule: Rule, slot: Slot, tensors: list[torch.Tensor]) -> None:
        """Segment by segment; padding stays the zeros that the file was made with."""
        row = 0
        for segment in rule.segments(slot.parts, slot.rank):
            if segment.source != PADDING:
                piece = tensors[segment.source].narrow(rule.axis or 0, segment.start, segment.stop - segment.start)
                self.writer.write_rows(slot.region, row, piece)
            row += segment.stop - segment.start if not rule.axis else 0

    def close(self) -> None:  # noqa: B027  most formats have nothing to add
        """Write what belongs beside the weights."""

    def seal(self) -> None:  # noqa: B027  most formats have no place for them
        """Note checksums of what was just verified, in formats that have a place for them."""

    def finish(self) -> None:
        """All on disk, then the folder gets its name."""
        self.writer.close()
        self.close()
        if self.folder.exists():
            self.folder.rmdir()
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.resolve().parent)

    def abandon(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self.writer.close(sync=False)
        shutil.rmtree(self.partial, ignore_errors=True)


def copy_companions(spec: ModelSpec, folder: Path) -> None:
    """config.json, tokenizer and the like of `spec`'s folder into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *COMPANIONS):
        source = spec.folder / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.is_file():
            shutil.copyfile(source, folder / name)


def assets(folder: Path, model: Path | None) -> tuple[dict[str, object], Path]:
    """(config.json, its folder) that tell a Megatron folder's architecture: `model` if given, else what was copied beside the weights."""
    for candidate in ([model] if model else [folder / HF_FOLDER, folder]):
        if (candidate / "config.json").is_file():
            return read_json(candidate / "config.json"), candidate
    raise UserError(f"{model or folder}: has no config.json; name the HF folder of this model's architecture and tokenizer with --model")


def sync_folder(path: Path) -> None:
    """Make a rename within `path` last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
