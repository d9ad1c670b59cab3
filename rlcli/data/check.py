"""`msrl data check`: whether a prepared data set is what its manifest says, and fits a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.data.clean import STEPS
from rlcli.data.manifest import Manifest, is_prepared, read_manifest
from rlcli.data.prepare import check_fits
from rlcli.data.shards import columns, file_sha256

_ROLES = {"prompt": 1, "chosen": 2, "rejected": 2}  # greatest role of each column


def check(folder: Path, tokenizer: str | None = None) -> tuple[list[str], list[str]]:
    """(what was verified, what is wrong) of a data set and its validation part.

    Verified are: every file's size, hash and rows, the sum of the counts, ids within the vocabulary, lengths and roles that agree with
    them, no empty prompt or answer; with `tokenizer`, that it and its chat template are those the set was made with.
    Raises UserError where the folder is no data set at all, or does not fit the tokenizer.
    """
    manifest = read_manifest(folder)
    if tokenizer:
        check_fits(manifest, folder, tokenizer)
    faults = [*_counts(manifest), *_files(folder, manifest)]
    done = [f"{len(manifest.files)} file(s): size, hash, rows, ids and lengths of {manifest.rows:,} {manifest.kind}", "the counts of the steps"]
    if is_prepared(folder / "validation"):
        part = read_manifest(folder / "validation")
        faults += _files(folder / "validation", part)
        done.append(f"{part.rows:,} {part.kind} for validation")
    if tokenizer:
        done.append(f"tokenizer and chat template of {tokenizer}")
    return done, faults


def _counts(manifest: Manifest) -> Iterator[str]:
    counts = manifest.counts
    accounted = sum(counts[name] for name in (*STEPS, "kept", "validation"))
    if accounted != counts["read"]:
        yield f"the counts do not add up: {counts['read']} rows read, {accounted} accounted for"
    if counts["kept"] != manifest.rows:
        yield f"the manifest says {counts['kept']} rows were kept and {manifest.rows} written"


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    listed = {shard["file"] for shard in manifest.files}
    for path in sorted(folder.glob("*.parquet")):
        if path.name not in listed:
            yield f"{path}: is not in the manifest"
    for shard in manifest.files:
        path = folder / shard["file"]
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != shard["bytes"] or file_sha256(path) != shard["sha256"]:
            yield f"{path}: changed since it was made ({path.stat().st_size:,} bytes, {shard['bytes']:,} in the manifest)"
        else:
            yield from _rows(path, shard, manifest)


def _rows(path: Path, shard: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)
    if file.metadata.num_rows != shard["rows"]:
        yield f"{path}: {file.metadata.num_rows} rows, the manifest says {shard['rows']}"
    if file.schema_arrow != columns(manifest.kind):
        yield f"{path}: its columns are not those of {manifest.kind}"
        return
    first = 0
    for group in range(file.metadata.num_row_groups):
        table = file.read_row_group(group).combine_chunks()
        for name in ("prompt",) if manifest.kind == "prompts" else ("prompt", "chosen", "rejected"):
            for row, problem in _column(table, name, manifest):
                yield f"{path}, row {first + row}: {problem}"
        first += table.num_rows


def _column(table: Any, name: str, manifest: Manifest) -> Iterator[tuple[int, str]]:
    ids = table.column(f"{name}_ids").chunk(0)
    lengths = np.diff(ids.offsets.to_numpy())
    for row in np.flatnonzero(lengths != table.column(f"{name}_tokens").to_numpy()):
        yield int(row), f"{name} has {lengths[row]} ids, the row says otherwise"
    for row in np.flatnonzero(lengths == 0):
        yield int(row), f"{name} is empty"
    values = ids.flatten().to_numpy()
    wrong = np.flatnonzero((values < 0) | (values >= manifest.tokenizer["size"]))
    if len(wrong):
        row = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        yield row, f"{name} has the id {values[wrong[0]]}, the tokenizer has {manifest.tokenizer['size']}"
    if manifest.kind == "pairs":
        for row, roles in enumerate(table.column(f"{name}_roles").to_pylist()):
            if roles is not None and (len(roles) != lengths[row] or max(roles, default=0) > _ROLES[name]):
                yield row, f"the roles of {name} do not fit its ids"
