"""Append-only files of JSON objects, one a line, that survive a crash in the middle of a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlcli.errors import RunError

Row = dict[str, Any]
AFTER = "set_aside_after_step"  # in the line below a block of lines that were set aside


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


def rewind(path: Path, step: int, taken: int, newest: int) -> tuple[int, int]:
    """Make a file what it was when the checkpoint of `step` was saved, ready for appending: (lines moved away, lines taken back).

    What does not belong to that checkpoint, a torn last line too, moves to PATH.set-aside and is never lost: below it goes a line with the
    step it came after and `newest`, the number of the newest checkpoint then. `taken` is the number of the checkpoint to go on from: all
    moves since it was saved are undone first. The file is replaced whole or not at all.
    """
    if not path.is_file():
        return 0, 0
    aside = path.with_name(f"{path.name}.set-aside")
    lines = path.read_bytes().splitlines(keepends=True)
    wanted, shared = lines, step
    for after, number, block in reversed(_blocks(aside)):
        if number < taken:
            break
        wanted, shared = _up_to(wanted, after) + block, min(shared, after)
    wanted, kept = _up_to(wanted, step), _up_to(lines, shared)
    if wanted == lines:
        return 0, 0
    moved = [line for line in lines if _step(line) > shared]
    _set_aside(aside, moved, shared, newest)
    draft = path.with_name(f".{path.name}.part")
    draft.write_bytes(b"".join(wanted))
    draft.replace(path)
    return len(moved), len(wanted) - len(kept)


def _set_aside(aside: Path, lines: list[bytes], after: int, newest: int) -> None:
    """One more block. On the disk before its lines leave the file."""
    with aside.open("a+b") as out:
        if out.tell() and aside.read_bytes()[-1:] != b"\n":
            out.write(b"\n")  # a write of before was cut short
        out.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
        out.write(encode({AFTER: after, "lines": len(lines), "newest_checkpoint": newest}))
        out.flush()
        os.fsync(out.fileno())


def _blocks(aside: Path) -> list[tuple[int, int, list[bytes]]]:
    """What was set aside, in order: (after which step, newest checkpoint then, lines)."""
    if not aside.is_file():
        return []
    lines, blocks = aside.read_bytes().splitlines(keepends=True), []
    for place, line in enumerate(lines):
        if (mark := _decode(line)) is not None and AFTER in mark:
            blocks.append((int(mark[AFTER]), int(mark["newest_checkpoint"]), lines[max(0, place - int(mark["lines"])) : place]))
    return blocks


def _up_to(lines: list[bytes], step: int) -> list[bytes]:
    return [line for line in lines if _step(line) <= step]


def _step(line: bytes) -> float:
    """The step of a row; a torn line is beyond all."""
    row = _decode(line)
    return math.inf if row is None else row.get("step", 0)


def _decode(line: bytes) -> Row | None:
    """The object on a line, or None where the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
