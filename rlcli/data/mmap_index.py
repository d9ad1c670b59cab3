"""Megatron's memory-mapped token files (.bin and .idx), as the predecessor's preparation wrote them: `PREFIX_packed_KEY_document`.

Format of .idx (MMIDIDX, version 1, little endian): magic, version uint64, type code uint8, number of sequences uint64, number of
document borders uint64, then sequence lengths int32, byte offsets int64, document borders int64 (the first is 0).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcli.data.readers import FileFault

_MAGIC = b"MMIDIDX\x00\x00"
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}
_NAME = re.compile(r"^(?P<prefix>.+)_packed_(?P<key>\w+?)_document\.(idx|bin)$")


class TokenFile:
    """One .idx with its .bin: document i as an array, read where it lies."""

    def __init__(self, index: Path) -> None:
        """Raises readers.FileFault where the pair of files is damaged or cut off."""
        raw = index.read_bytes()
        if raw[:9] != _MAGIC:
            raise FileFault(f"{index.name} is no Megatron index (its first bytes are not MMIDIDX)")
        head = struct.calcsize("<QBQQ")
        if len(raw) < 9 + head:
            raise FileFault(f"{index.name} is cut off")
        version, code, sequences, borders = struct.unpack_from("<QBQQ", raw, 9)
        if version != 1 or code not in _TYPES:
            raise FileFault(f"{index.name} has version {version} and type code {code}; version 1 with codes 1-8 can be read")
        if len(raw) < 9 + head + 12 * sequences + 8 * borders:
            raise FileFault(f"{index.name} is cut off")
        lengths = np.frombuffer(raw, np.int32, sequences, 9 + head)
        self._offsets = np.frombuffer(raw, np.int64, sequences, 9 + head + 4 * sequences)
        self._borders = np.frombuffer(raw, np.int64, borders, 9 + head + 12 * sequences)
        self._lengths = lengths.astype(np.int64)
        self._type = np.dtype(_TYPES[code])
        data = index.with_suffix(".bin")
        needed = int((self._offsets + self._lengths * self._type.itemsize).max()) if sequences else 0
        if not data.exists() or data.stat().st_size < needed:
            raise FileFault(f"{data.name} is {'cut off' if data.exists() else 'missing'}: {index.name} speaks of {needed} bytes")
        self._data = np.memmap(data, np.uint8, "r") if needed else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return max(len(self._borders) - 1, 0)

    def __getitem__(self, document: int) -> npt.NDArray[np.int64]:
        """The tokens of one document, all its sequences in a row, [T]."""
        parts = [
            np.frombuffer(self._data, self._type, int(self._lengths[s]), int(self._offsets[s]))
            for s in range(int(self._borders[document]), int(self._borders[document + 1]))
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def prefixes(path: Path) -> list[Path]:
    """The prefixes of the sets that `path` names: a folder of sets, a prefix, or one of a set's files."""
    named = _NAME.match(path.name)
    if named:
        return [path.with_name(named["prefix"])]
    if path.is_dir():
        names = (_NAME.match(file.name) for file in path.iterdir() if file.suffix == ".idx")
        return sorted({path / match["prefix"] for match in names if match})
    return [path] if not path.exists() and key_files(path) else []


def key_files(prefix: Path) -> dict[str, Path]:
    """The .idx file of each key of a set."""
    found = {}
    if prefix.parent.is_dir():
        for file in sorted(prefix.parent.iterdir()):
            match = _NAME.match(file.name)
            if match and file.suffix == ".idx" and match["prefix"] == prefix.name:
                found[match["key"]] = file
    return found


def all_files(prefix: Path) -> list[Path]:
    """Every file of a set, .idx and .bin, in a fixed order."""
    return [path for index in key_files(prefix).values() for path in (index, index.with_suffix(".bin")) if path.exists()]


def read_set(prefix: Path, meter: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a set: each key with its token ids, besides attention_mask, which says nothing that lengths do not."""
    files = {key: TokenFile(index) for key, index in key_files(prefix).items() if not key.endswith("attention_mask")}
    counts = {key: len(file) for key, file in files.items()}
    if not counts or len(set(counts.values())) != 1:
        raise FileFault(f"the files of this set have different numbers of rows: {counts}")
    total, size = next(iter(counts.values())), meter.bytes
    for number in range(total):
        yield number + 1, {key: file[number].tolist() for key, file in files.items()}
    meter.bytes = size + sum(path.stat().st_size for path in all_files(prefix))
