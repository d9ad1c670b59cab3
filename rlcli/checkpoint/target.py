"""Writing a model in any format: all places are laid out and made first, then each tensor goes to its places as it comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rlcli.checkpoint.disk import sync_folder
from rlcli.checkpoint.regions import Region, RegionWriter
from rlcli.checkpoint.sums import size_text, write_sums
from rlcli.errors import UserError
from rlcli.models.export import COMPANIONS
from rlcli.models.files import read_json
from rlcli.models.layout import Layout
from rlcli.models.rules import PADDING, Rule, join, lay
from rlcli.models.spec import ModelSpec
from rlcli.models.unfinished import MARK, WHOLE

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
    """A model being written to `folder`, at `folder`.partial until `publish`. Subclasses fill `slots` in `prepare` and may add to `close`.

    In this order: create, put for every rule, finish, seal if it was verified, publish; abandon after an error at any point.
    """

    spec: ModelSpec
    layout: Layout
    folder: Path
    dtype: str  # "keep", or a torch name
    source_dtype: dict[str, str]  # HF name -> the dtype it has in the source
    step: int | None = None
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    writer: RegionWriter = field(default_factory=RegionWriter)
    mark: IO[str] | None = None  # the file MARK in `partial`, locked as long as its writer lives

    format = ""

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    def dtype_of(self, rule: Rule, number: int = 0) -> str:
        """What source number `number` of `rule` is stored as; all are the same but in HF folders."""
        return self.source_dtype[rule.sources[number].name] if self.dtype == "keep" or rule.buffer else self.dtype

    def joined(self, rule: Rule) -> str:
        """Rules that are stored as one tensor have the same of this."""
        return rule.name

    def check_dtypes(self, where: Path) -> None:
        """UserError where one tensor is to hold HF tensors of several dtypes: some would lose bits."""
        firsts: dict[str, tuple[str, str]] = {}
        for rule in self.spec.rules:
            for number, source in enumerate(rule.sources):
                dtype = self.dtype_of(rule, number)
                name, first = firsts.setdefault(self.joined(rule), (source.name, dtype))
                if dtype != first:
                    lossless = " (nothing is lost)" if "float64" not in (dtype, first) else ""
                    raise UserError(f"{where}: {name} is {first} and {source.name} {dtype}, which {self.format} folders hold in one dtype; "
                                    f"give --dtype float32{lossless} or --dtype bfloat16")

    @abstractmethod
    def bytes(self) -> int:
        """Size of all weights in the target, repeated ones included."""

    @abstractmethod
    def prepare(self) -> None:
        """Make all files below `partial` and fill `slots`."""

    def check_place(self, sources: Iterable[Path]) -> None:
        """UserError where the folder is not free or can get no finished one's name, and where working beside it would destroy a source."""
        if self.folder.is_symlink():
            raise UserError(f"{self.folder}: is a symbolic link that leads nowhere; choose another folder or remove it")
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder}: exists already and is not empty; choose another folder or remove it")
        if self.folder.exists() and is_mount(self.folder):
            raise UserError(f"{self.folder}: is a mount point, which no finished folder can replace; give a new folder below it, as {self.folder / 'model'}")
        for source in sources:
            if self.partial.resolve() in (source.resolve(), *source.resolve().parents):
                raise UserError(f"{source}: is where a conversion to {self.folder} works; rename it, or choose another folder for --save")

    def create(self) -> None:
        """Check that the disk has room, then make the files."""
        parent = self.folder.resolve().parent
        there = next(path for path in (parent, *parent.parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if free < self.bytes():
            raise UserError(f"{there}: {size_text(self.bytes())} are needed, {size_text(free)} are free")
        parent.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.prepare()

    def _claim(self) -> None:
        """Make `partial`. What a killed conversion left there is removed; what another writes, or something else made, is not."""
        if self.partial.exists():
            mark = self.partial / MARK
            if not mark.is_file():
                raise UserError(f"{self.partial}: is in the way and no conversion made it; remove it or choose another folder")
            with open(mark, encoding="utf-8") as file:
                if not _lock(file):
                    raise UserError(f"{self.partial}: another conversion is writing it; wait for that, or choose another folder")
            _empty(self.partial)
            shutil.rmtree(self.partial)
        self.partial.mkdir()
        self.mark = open(self.partial / MARK, "w", encoding="utf-8")  # noqa: SIM115  held until publish or abandon
        _lock(self.mark)

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

    def put_parts(self, rule: Rule, shards: list[torch.Tensor]) -> None:
        """Write `rule` from all its shards at another layout, in rank order."""
        self.put(rule, lay(rule, shards))

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

    def finish(self) -> None:
        """All is on the disk."""
        self.writer.close()
        self.close()

    def seal(self) -> None:
        """Note checksums of what is verified."""
        write_sums(self.partial, [MARK])

    def publish(self) -> None:
        """The folder gets its name."""
        if self.mark is not None:
            print(WHOLE, end="", file=self.mark, flush=True)
            os.fsync(self.mark.fileno())
        if self.folder.exists():
            self.folder.rmdir()
        os.rename(self.partial, self.folder)
        self._unmark(self.folder)
        sync_folder(self.folder.resolve().parent)

    def clear(self) -> None:
        """Remove all that was written, but stay at work."""
        with contextlib.suppress(OSError):
            _empty(self.partial)

    def abandon(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self.writer.close(sync=False)
        if self.mark is not None:  # else `partial` is not ours
            with contextlib.suppress(OSError), self.mark as mark:
                _empty(self.partial)
                (self.partial / MARK).unlink()
                mark.close()  # NFS keeps the name of an open file
                self.partial.rmdir()
            self.mark = None

    def _unmark(self, folder: Path) -> None:
        if self.mark is not None:
            with contextlib.suppress(OSError):
                (folder / MARK).unlink()
            self.mark.close()
            self.mark = None


def place(save: Path) -> Path:
    """`save` as a folder that has a name of its own, to stand beside: what a symbolic link leads to, and what . and .. are."""
    return Path(os.path.realpath(save)) if os.path.islink(save) or save.name in ("", "..") else save


def is_mount(folder: Path) -> bool:
    """Whether something is mounted at `folder`, be it a folder of the same file system."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    points = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal.group(1), 8)), line.split()[4]) for line in lines)
    return os.path.ismount(folder) or str(folder.resolve()) in points


def _empty(folder: Path) -> None:
    """Remove all but the mark: what is left by a kill on the way stays marked."""
    for entry in folder.iterdir():
        if entry.name != MARK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


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


def _lock(file: IO[str]) -> bool:
    """Whether nobody else has the lock of `file`, which is taken; on file systems without locks nobody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
