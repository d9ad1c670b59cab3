"""Checksums that lie beside a model's files, in the form that `sha256sum -c` reads, and sizes for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlcli.checkpoint.disk import seal_files, write_file
from rlcli.errors import UserError

SUMS = "SHA256SUMS"
WEIGHTS = ("*.safetensors", "*.distcp", ".metadata", "*.pt")
_LINE = re.compile(r"^([0-9a-f]{64})[ ][ *](.+)$")


def is_weights(path: Path) -> bool:
    """Whether a file holds weights, or describes where they lie; else it stands beside them: a configuration, a tokenizer."""
    return any(path.match(pattern) for pattern in WEIGHTS)


def write_sums(folder: Path, leave: Sequence[str] = ()) -> None:
    """Note the checksums of all files below `folder` but those of the names or patterns in `leave`, and the note itself."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not any(path.match(pattern) for pattern in (SUMS, *leave)))
    lines = [f"{digest}  {path.relative_to(folder).as_posix()}\n" for path, (_, digest) in zip(paths, seal_files(paths), strict=True)]
    write_file(folder / SUMS, "".join(lines).encode())


def read_sums(folder: Path) -> dict[Path, str]:
    """The noted checksum by file; empty where none were. UserError for lines that are no checksums, and files outside the folder."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = _LINE.match(line)
        if match is None or Path(match.group(2)).is_absolute() or ".." in Path(match.group(2)).parts:
            raise UserError(f"{path}: line {number} is no checksum of a file in this folder; remove {SUMS} if it is not meant for it")
        found[folder / match.group(2)] = match.group(1)
    return found


def files_text(count: int) -> str:
    return f"{count} file" + "s" * (count != 1)


def size_text(count: int) -> str:
    """Bytes in a unit that leaves few digits before the point."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"
