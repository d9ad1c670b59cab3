"""Finding and checking checkpoints, without writing anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlcli.checkpoint import disk, manifest
from rlcli.checkpoint.manifest import Damaged, FileEntry, Manifest
from rlcli.errors import MsrlError, UserError

COMPLETE = re.compile(r"step-\d{8,}(\.\d+)?")
FOLDER = "checkpoints"  # of a run's folder


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def complete(folder: Path, say: Callable[[str], None] = lambda text: None) -> list[Checkpoint]:
    """The checkpoints of a folder whose manifests hold and whose files have their sizes, oldest first. Others are told and left out."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and COMPLETE.fullmatch(path.name):
            try:
                found.append(open_checkpoint(path))
            except Damaged as error:
                say(f"checkpoint {path.name} is damaged: {error}")
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.sequence)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint after the quick checks: manifest and sizes. Raises Damaged."""
    known = manifest.read(path)
    for name, entry in known.files.items():
        if fault := _size_fault(path / name, name, entry):
            raise Damaged(fault)
    return Checkpoint(path, known)


def verify(path: Path) -> list[str]:
    """Everything wrong with a checkpoint, every checksum computed anew; empty where all is well. Raises UserError for a newer schema."""
    try:
        known = manifest.read(path)
    except Damaged as error:
        return [str(error)]
    with ThreadPoolExecutor(disk.THREADS) as threads:
        faults = threads.map(lambda item: _fault(path / item[0], *item), known.files.items())
        return [fault for fault in faults if fault]


def newest_good(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of a folder with every checksum right; tells of damaged ones before it. None where there is none."""
    for checkpoint in reversed(complete(folder, say)):
        faults = verify(checkpoint.path)
        if not faults:
            return checkpoint
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        say(f"checkpoint {checkpoint.path.name} is damaged: {faults[0]}{more}; taking the one before")
    return None


def resolve(path: Path, say: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """The checkpoint that a path means: one itself, or the newest good one of a checkpoints folder or of a run's folder.

    Raises UserError where there is none: with what was looked for, or with what is wrong with the one named.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run's folder, its checkpoints folder, or one checkpoint")
    if (path / manifest.NAME).exists() or COMPLETE.fullmatch(path.name):
        faults = verify(path)
        if faults:
            raise UserError(f"{path}: this checkpoint is damaged ({faults[0]}); give {path.parent} to take the newest good one")
        return Checkpoint(path, manifest.read(path))
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    damaged: list[str] = []

    def tell(text: str) -> None:
        damaged.append(text)
        say(text)

    found = newest_good(folder, tell)
    if found is not None:
        return found
    if damaged:
        raise UserError(f"{folder}: no checkpoint is whole ({'; '.join(damaged)})")
    raise UserError(f"{folder}: no complete checkpoint here; give a run's folder, its checkpoints folder, or one checkpoint (step-NNNNNNNN)")


def _size_fault(path: Path, name: str, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return f"{name} is missing"
    return None if size == entry.bytes else f"{name} has {size} bytes instead of {entry.bytes}"


def _fault(path: Path, name: str, entry: FileEntry) -> str | None:
    if fault := _size_fault(path, name, entry):
        return fault
    try:
        _, digest = disk.hash_file(path)
    except MsrlError as error:
        return f"{name}: {error}"
    return None if digest == entry.sha256 else f"{name} differs from its checksum"
