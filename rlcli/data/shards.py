"""The Parquet files of a prepared data set: their columns, and a writer that makes the same bytes from the same rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rlcli.data.rows import Row
from rlcli.data.tokens import Encoded

ROW_GROUP = 512  # rows that are read at once


def columns(kind: str) -> Any:
    """The Arrow schema of a kind. Lists of roles are null where every token belongs to the last answer (answers) or to none (prompts)."""
    import pyarrow as pa

    ids, roles = pa.list_(pa.int32()), pa.list_(pa.uint8())
    common = [("prompt_ids", ids), ("prompt_tokens", pa.int32()), ("prompt", pa.string())]
    tail = [("extra", pa.string()), ("file", pa.int32()), ("row", pa.int64())]
    if kind == "prompts":
        return pa.schema([*common, ("answer", pa.string()), *tail])
    sides = [
        field
        for side in ("chosen", "rejected")
        for field in ((f"{side}_ids", ids), (f"{side}_tokens", pa.int32()), (f"{side}_roles", roles), (side, pa.string()))
    ]
    return pa.schema([*common, ("prompt_roles", roles), *sides, *tail])


def record(row: Row, encoded: Encoded, kind: str) -> dict[str, Any]:
    """One row as its columns."""
    out: dict[str, Any] = {
        "prompt_ids": encoded.prompt, "prompt_tokens": len(encoded.prompt), "prompt": encoded.prompt_text,
        "extra": json.dumps(row.extra, sort_keys=True, default=str) if row.extra else None, "file": row.file, "row": row.number,
    }
    if kind == "prompts":
        out["answer"] = encoded.answer
        return out
    out["prompt_roles"] = encoded.prompt_roles
    for side, ids, roles, text in zip(("chosen", "rejected"), encoded.answers, encoded.roles, encoded.texts, strict=True):
        out |= {f"{side}_ids": ids, f"{side}_tokens": len(ids), f"{side}_roles": roles, side: text}
    return out


class ShardWriter:
    """Writes rows into part-00000.parquet, part-00001.parquet, ...; `files` lists what was written, with hashes."""

    def __init__(self, folder: Path, kind: str, shard_rows: int) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.rows = 0
        self.files: list[dict[str, Any]] = []
        self._schema = columns(kind)
        self._shard_rows = shard_rows
        self._waiting: list[dict[str, Any]] = []
        self._writer: Any = None
        self._in_shard = 0

    def add(self, item: dict[str, Any]) -> None:
        self._waiting.append(item)
        self.rows += 1
        full = self._in_shard + len(self._waiting) == self._shard_rows
        if full or len(self._waiting) == ROW_GROUP:
            self._write()
        if full:
            self._close()

    def finish(self) -> None:
        """Write what waits and close the last file. A data set without rows still has one file, so that its columns can be seen."""
        if self._waiting or not self.files:
            self._write()
        self._close()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            path = self.folder / f"part-{len(self.files):05d}.parquet"
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._waiting, self._schema), row_group_size=ROW_GROUP)
        self._in_shard += len(self._waiting)
        self._waiting = []

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        path = self.folder / f"part-{len(self.files):05d}.parquet"
        self.files.append({"file": path.name, "rows": self._in_shard, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
        self._in_shard = 0


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
