"""Files in every format give the same rows; damaged ones end with one line that names them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcli.data import readers
from rlcli.data.rows import BadRow
from rlcli.data.sources import Meter, find_sources, read_rows
from rlcli.errors import UserError

ROWS = [{"prompt": f"What is {i} + 1?", "answer": f"{i + 1}"} for i in range(2500)] + [{"prompt": "Zeile,\n\"zwei\" 数学", "answer": "é\t🦊"}]


def _write_csv(path: Path, delimiter: str) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def _write_arrow(path: Path, stream: bool) -> None:
    table = pa.Table.from_pylist(ROWS)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=900),
    "a.arrow": lambda path: _write_arrow(path, stream=False),
    "s.arrow": lambda path: _write_arrow(path, stream=True),
    "a.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path),
    "a.jsonl": lambda path: path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n"),
    "b.jsonl": lambda path: path.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8"),
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "b.json": lambda path: path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8"),
    "a.csv": lambda path: _write_csv(path, ","),
    "a.tsv": lambda path: _write_csv(path, "\t"),
}


def _packed(path: Path, how: str) -> Path:
    data = path.read_bytes()
    half = len(data) // 2
    frames = [data[:half], data[half:]]  # two of them, as tools that append write them
    packed = b"".join(map(gzip.compress if how == ".gz" else zstandard.compress, frames))
    out = path.with_name(path.name + how)
    out.write_bytes(packed)
    return out


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, packing: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    if packing:
        path = _packed(path, packing)
    (source,) = find_sources([str(path)])
    meter = Meter()
    got = list(read_rows(source, meter))
    assert [row for _, row in got] == ROWS
    assert all(a < b for (a, _), (b, _) in pairwise(got))
    assert got[0][0] >= 1
    assert meter.bytes <= source.bytes or packing


def test_files_folders_and_globs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n')

    def names(*inputs: str) -> list[str]:
        return [source.path.name for source in find_sources([str(tmp_path / text) for text in inputs])]

    assert names("") == ["a.jsonl", "b.jsonl", "c.csv"]
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("b.jsonl", "a.jsonl", "b.jsonl") == ["b.jsonl", "a.jsonl"]  # the given order, each once
    for inputs, problem in ((["missing.jsonl"], "no such file"), (["*.tsv"], "no file matches"), (["notes.txt"], "unknown format")):
        with pytest.raises(UserError, match=problem):
            names(*inputs)
    with pytest.raises(UserError, match="no input"):
        find_sources([])


def _bad_files() -> dict[str, tuple[bytes, str]]:
    rows = json.dumps(ROWS[:50]).encode()
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:50])
    parquet = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS[:50]), parquet)
    whole = parquet.getvalue().to_pybytes()
    latin = '{"prompt": "caf\xe9", "answer": "1"}\n'.encode("latin-1")
    return {
        "empty.jsonl": (b"", "the file is empty"),
        "blank.jsonl": (b"\n\n", "no rows"),
        "cut.jsonl": (lines + b'{"prompt": "never ends', "cut off in the middle of line 51"),
        "latin.jsonl": (lines + latin, "line 51 is not UTF-8"),
        "latin.json": (b"[" + latin + b"]", "not UTF-8"),
        "latin.csv": (b"prompt,answer\ncaf\xe9,1\n", "line 2 is not UTF-8"),
        "cut.json": (rows[:-20], "not JSON, or cut off, after row 49"),
        "open.json": (rows[:-1], "the array is not closed"),
        "none.json": (b"[]", "no rows"),
        "header.csv": (b"prompt,answer\n", "no rows below its header"),
        "twice.csv": (b"prompt,prompt\n1,2\n", "stands twice"),
        "cut.parquet": (whole[: len(whole) // 2], "cut off or damaged"),
        "text.parquet": (b"this is no parquet file at all", "cut off or damaged"),
        "cut.arrow": (b"ARROW1\0\0" + b"\xff\xff\xff\xff\x10", "cut off or damaged"),
        "cut.jsonl.gz": (gzip.compress(lines)[:-30], "cut off or damaged"),
        "text.jsonl.gz": (lines, "cut off or damaged"),
        "cut.jsonl.zst": (zstandard.compress(lines * 50)[:-10], "cut off or damaged"),
        "text.jsonl.zst": (lines, "cut off or damaged"),
        "zero.parquet": (_no_rows(), "no rows"),
    }


def _no_rows() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("name", list(_bad_files()))
def test_bad_files_end_with_one_line(tmp_path: Path, name: str) -> None:
    data, problem = _bad_files()[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        list(read_rows(find_sources([str(path)])[0]))
    said = str(caught.value)
    assert name in said
    assert problem in said
    assert "\n" not in said


def test_bad_rows_come_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n[1, 2]\nnonsense\n{"a": 2}\n')
    (source,) = find_sources([str(path)])
    got = list(read_rows(source))
    assert [number for number, _ in got] == [1, 3, 4, 5]
    assert [isinstance(row, BadRow) for _, row in got] == [False, True, True, False]
    assert "the list [1, 2]" in str(got[1][1])
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n1,2,3\n4,5\n")
    (source,) = find_sources([str(path)])
    (one, two, three) = read_rows(source)
    assert one[1] == {"a": "1", "b": "2"}
    assert three[1] == {"a": "4", "b": "5"}
    assert two[0] == 3
    assert "found 3" in str(two[1])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=12), chunk=st.integers(1, 40), indent=st.sampled_from([None, 0, 3]))
def test_json_arrays_are_read_right_at_any_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], chunk: int, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=indent), encoding="utf-8", errors="surrogatepass")
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    with open(path, "rb") as file:
        assert [row for _, row in readers.read_json(file)] == rows
