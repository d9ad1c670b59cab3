"""Append-only files of JSON objects, one a line, that survive a crash in the middle of a line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlcli.errors import RunError

Row = dict[str, Any]


def encode(row: Row) -> bytes:
    """One line of strict JSON in UTF-8: a number that is not finite becomes null, a lone surrogate a question mark."""
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    return (json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def read(path: Path) -> Iterator[Row]:
    """The complete rows of a file, also while it is being written: a torn last line is left out. Nothing where there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            row = _decode(line)
            if row is not None:
                yield row


class Appender:
    """Opens a file for appending. Every row is handed to the system before `append` returns, so killing the process loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def append(self, row: Row) -> None:
        """Write one row. Raises RunError where the disk refuses."""
        self.extend([row])

    def extend(self, rows: list[Row]) -> None:
        """Write several rows at once."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            self._file.write(b"".join(encode(row) for row in rows))
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def rewind(path: Path, keep: Callable[[Row], bool]) -> int:
    """Prepare a file for appending after an interruption: rows that `keep` refuses, and a torn last line, move to PATH.set-aside.

    Returns the number of lines moved. The file is replaced whole or not at all.
    """
    if not path.is_file():
        return 0
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        row = _decode(line)
        (kept if row is not None and keep(row) else moved).append(line)
    if moved:
        with path.with_name(f"{path.name}.set-aside").open("ab") as aside:
            aside.writelines(line if line.endswith(b"\n") else line + b"\n" for line in moved)
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(b"".join(kept))
        draft.replace(path)
    return len(moved)


def _decode(line: bytes) -> Row | None:
    """The object on a line, or None where the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
