"""Readers of single formats. Each takes an open binary file and yields (row number from 1, row or BadRow)."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from rlcli.data.rows import BadRow

Rows = Iterator[tuple[int, dict[str, Any] | BadRow]]
BATCH = 1024  # rows taken from a columnar file at once
_CHUNK = 1 << 18  # bytes of a JSON array read at once
_SPACE = re.compile(r"[\s,]*")


class FileFault(Exception):
    """The whole file is bad; says how, without its name."""


def one_line(error: BaseException) -> str:
    """An error's text as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:160] + "..."


def read_parquet(file: Any, size: int, meter: Any) -> Rows:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    total, number = parquet.metadata.num_rows, 0
    if total == 0:
        raise FileFault("the file has no rows")
    for batch in parquet.iter_batches(batch_size=BATCH):
        yield from ((number + i, row) for i, row in enumerate(batch.to_pylist(), start=1))
        number += batch.num_rows
        meter.bytes = size * number // total


def read_arrow(file: Any, size: int, meter: Any) -> Rows:
    """Arrow IPC files and streams, and Feather (version 2, which is the same; version 1 is old and refused by name)."""
    import pyarrow as pa

    magic = file.read(6)
    file.seek(0)
    if magic[:4] == b"FEA1":
        raise FileFault("Feather version 1 is too old to read in a stream: write it again with a current pyarrow")
    if magic == b"ARROW1":
        whole = pa.ipc.open_file(file)
        batches: Iterator[Any] = (whole.get_batch(i) for i in range(whole.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(file))
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH):
            part = batch.slice(start, BATCH)
            yield from ((number + i, row) for i, row in enumerate(part.to_pylist(), start=1))
            number += part.num_rows
            meter.bytes = min(size, file.tell())
    if number == 0:
        raise FileFault("the file has no rows")
    meter.bytes = size


def _row(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow("", 'an object with columns, like {"prompt": "..."}', value)


def read_jsonl(file: IO[bytes]) -> Rows:
    """One object a line; blank lines are passed over."""
    any_row = False
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise FileFault(f"line {number} is not UTF-8 text ({one_line(error)}); convert the file first, for instance with iconv") from error
        if not line.strip():
            continue
        any_row = True
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not raw.endswith(b"\n") and _is_cut(line):
                raise FileFault(f"cut off in the middle of line {number}") from error
            yield number, BadRow("", "an object in JSON", problem=f"found {line.strip()[:60]!r} ({one_line(error)})")
            continue
        yield number, _row(value)
    if not any_row:
        raise FileFault("the file has no rows")


def _is_cut(line: str) -> bool:
    """Whether a last line without its newline began an object and never closed it."""
    text = line.strip()
    return text.startswith("{") and not text.endswith("}")


def read_json(file: IO[bytes]) -> Rows:
    """An array of objects, taken one by one without holding the whole file; objects in a row without an array pass too."""
    decoder = json.JSONDecoder()
    text = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, at, number, done, in_array = "", 0, 0, False, False
    wanted = _CHUNK
    while True:
        raw = b"" if done else file.read(wanted)
        done = not raw
        buffer, at = buffer[at:] + text.decode(raw, final=done), 0
        if not in_array and number == 0 and buffer.lstrip()[:1] == "[":
            in_array, at = True, buffer.index("[") + 1
        before = number
        for value, end in _objects(decoder, buffer, at, done):
            number, at = number + 1, end
            yield number, _row(value)
        at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
        if buffer[at : at + 1] == "]" and in_array:
            break
        if done:
            _json_end(buffer[at:], in_array, number)
            break
        wanted = _CHUNK if number > before else wanted * 2  # one long object: read more at once, so that retries stay few
    if number == 0:
        raise FileFault("the file has no rows: expected an array of objects")


def _objects(decoder: json.JSONDecoder, buffer: str, at: int, done: bool) -> Iterator[tuple[Any, int]]:
    while True:
        at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
        if at >= len(buffer) or buffer[at] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, at)
        except (ValueError, RecursionError):
            return
        if end == len(buffer) and not done and not isinstance(value, (dict, list, str)):
            return  # a number may go on in the next chunk
        yield value, end
        at = end


def _json_end(rest: str, in_array: bool, number: int) -> None:
    if rest.strip():
        try:
            json.loads(rest)
        except (ValueError, RecursionError) as error:
            raise FileFault(f"not JSON, or cut off, after row {number}: {one_line(error)}") from error
    if in_array:
        raise FileFault(f"cut off after row {number}: the array is not closed")


def _read_separated(file: IO[bytes], delimiter: str) -> Rows:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
    header = next(reader, None)
    if not header:
        raise FileFault("the file has no header line with column names")
    if len(set(header)) != len(header):
        raise FileFault(f"a column name stands twice in the header: {', '.join(header)}")
    any_row = False
    for values in reader:
        if not values:
            continue
        any_row = True
        if len(values) != len(header):
            yield reader.line_num, BadRow("", f"{len(header)} columns ({', '.join(header)})", problem=f"found {len(values)}")
        else:
            yield reader.line_num, dict(zip(header, values, strict=True))
    if not any_row:
        raise FileFault("the file has no rows below its header")


def _lines(file: IO[bytes]) -> Iterator[str]:
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise FileFault(f"line {number} is not UTF-8 text ({one_line(error)}); convert the file first, for instance with iconv") from error


def read_csv(file: IO[bytes]) -> Rows:
    return _read_separated(file, ",")


def read_tsv(file: IO[bytes]) -> Rows:
    return _read_separated(file, "\t")


TEXT_READERS: dict[str, Callable[[IO[bytes]], Rows]] = {"jsonl": read_jsonl, "json": read_json, "csv": read_csv, "tsv": read_tsv}
