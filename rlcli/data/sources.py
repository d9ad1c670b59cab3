"""Files of rows, read in a stream: which files a user means, what format each has, and their rows one after the other."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlcli.data import mmap_index, readers
from rlcli.data.rows import BadRow
from rlcli.errors import UserError

FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv",
}
_COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file of rows."""

    path: Path
    format: str  # parquet, arrow, jsonl, json, csv, tsv, or index (a Megatron set: `path` is its prefix)
    compression: str  # gzip, zstd or ""
    bytes: int

    def sha256(self) -> str:
        """Hash of the file's bytes (of a Megatron set: of all its .idx and .bin files)."""
        digest = hashlib.sha256()
        for path in mmap_index.all_files(self.path) if self.format == "index" else [self.path]:
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()


class Meter:
    """How many bytes of a file have been read, for progress."""

    def __init__(self) -> None:
        self.bytes = 0


def find_sources(inputs: list[str]) -> list[Source]:
    """The files that `inputs` (files, folders, globs) name, each once: in the given order, sorted within a folder or glob.

    Raises UserError where nothing is found, a format is unknown, or a file is empty.
    """
    if not inputs:
        raise UserError("no input: give --input FILE, a folder or a glob")
    found: dict[Path, Source] = {}
    for given in inputs:
        for path in _paths(given):
            found.setdefault(path.resolve(), _source(path))
    return list(found.values())


def _paths(given: str) -> list[Path]:
    """Files of rows; of a Megatron set the common prefix of its files."""
    path = Path(given).expanduser()
    prefixes = mmap_index.prefixes(path)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and _format_of(p)[0] and not p.name.startswith("."))
        if not files + prefixes:
            raise UserError(f"{given}: no file of rows in this folder (looked for {_known()})")
        return files + prefixes
    if prefixes:
        return prefixes
    if path.exists():
        return [path]
    files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
    if not files:
        raise UserError(f"{given}: no such file" if not glob.has_magic(given) else f"{given}: no file matches")
    return files


def _format_of(path: Path) -> tuple[str, str]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    last = suffixes[-2:-1] if compression else suffixes[-1:]
    return FORMATS.get(last[0], "") if last else "", compression


def _known() -> str:
    return ", ".join(FORMATS) + ", and these with .gz or .zst"


def _source(path: Path) -> Source:
    if not path.exists():  # the prefix of a Megatron set
        return Source(path, "index", "", sum(file.stat().st_size for file in mmap_index.all_files(path)))
    form, compression = _format_of(path)
    if not form:
        raise UserError(f"{path}: unknown format; the name must end in one of {_known()}")
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path}: the file is empty")
    return Source(path, form, compression, size)


def read_rows(source: Source, meter: Meter | None = None) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Rows of one file with their numbers from 1 (in text files: line numbers). A row that is no row comes as a BadRow.

    Raises UserError, one line with the file's name, for a file that is damaged, cut off or not UTF-8.
    """
    meter = meter or Meter()
    try:
        if source.format == "index":
            yield from mmap_index.read_set(source.path, meter)
        elif source.format in ("parquet", "arrow"):
            with _seekable(source) as file:
                reader = readers.read_parquet if source.format == "parquet" else readers.read_arrow
                yield from reader(file, source.bytes, meter)
        else:
            with _opened(source, meter) as file:
                yield from readers.TEXT_READERS[source.format](file)
    except UserError:
        raise
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{source.path}: cut off or damaged: {readers.one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source.path}: not UTF-8 text ({readers.one_line(error)}); convert it first, for instance with iconv") from error
    except readers.FileFault as error:
        raise UserError(f"{source.path}: {error}") from error
    except OSError as error:
        raise UserError(f"{source.path}: cannot be read: {readers.one_line(error)}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("pyarrow", "zstandard", "zlib", "_csv"):
            raise
        raise UserError(f"{source.path}: cut off or damaged: {readers.one_line(error)}") from error


class _Counted(io.RawIOBase):
    """A binary file that tells a meter how far it has been read."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._meter = meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._meter.bytes += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _opened(source: Source, meter: Meter) -> Iterator[IO[bytes]]:
    raw = io.BufferedReader(_Counted(source.path, meter), buffer_size=1 << 20)
    with raw:
        if source.compression == "gzip":
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        elif source.compression == "zstd":
            yield io.BufferedReader(_Unzstd(raw), buffer_size=1 << 20)
        else:
            yield raw


class _Unzstd(io.RawIOBase):
    """A zstd file unpacked in a stream; unlike the library's own reader it raises EOFError where the file ends inside a frame."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw = raw
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._frame = self._frame or self._new()
            self._ready = memoryview(self._frame.decompress(self._packed))
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def _seekable(source: Source) -> Iterator[Any]:
    """A columnar file as something to seek in: memory-mapped, or unpacked into a nameless temporary file."""
    import pyarrow as pa

    if not source.compression:
        with pa.memory_map(str(source.path)) as file:
            yield file
        return
    import shutil
    import tempfile

    with tempfile.TemporaryFile() as unpacked, _opened(source, Meter()) as packed:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
        unpacked.seek(0)
        yield unpacked
