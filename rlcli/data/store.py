"""Prepared data sets as training reads them: rows by number, read from disk in small groups as they are needed."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlcli.data.manifest import Manifest, read_manifest
from rlcli.data.tokens import EARLIER_ANSWER, LAST_ANSWER
from rlcli.errors import UserError
from rlcli.types import FloatArray, Int32Array, Prompt

_CACHED_GROUPS = 512  # row groups of 512 rows kept in memory: all of a usual data set, some 200 MiB of a huge one

RoleArray = npt.NDArray[np.uint8]


class _Shards:
    """The Parquet files of a data set: row i of all of them, a row group at a time."""

    def __init__(self, folder: Path, manifest: Manifest, wanted: list[str]) -> None:
        self.folder, self.manifest, self._wanted = folder, manifest, wanted
        self._files: list[Any] = []
        self._starts: list[int] = []  # first row of each group
        self._places: list[tuple[int, int]] = []  # (file, group) of each
        self._cache: OrderedDict[int, Any] = OrderedDict()
        row = 0
        for number, shard in enumerate(manifest.files):
            metadata = self._open(folder / shard["file"]).metadata
            if metadata.num_rows != shard["rows"]:
                raise UserError(f"{folder / shard['file']}: has {metadata.num_rows} rows, the manifest says {shard['rows']}: prepare the data anew")
            for group in range(metadata.num_row_groups):
                self._starts.append(row)
                self._places.append((number, group))
                row += metadata.row_group(group).num_rows

    def _open(self, path: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._files.append(pq.ParquetFile(path, memory_map=True))
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{path}: {'missing' if not path.exists() else 'damaged'}: prepare the data anew (`msrl data check {self.folder}` says more)") from error
        return self._files[-1]

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """A whole column of numbers, [rows]."""
        parts = [file.read(columns=[name]).column(0).to_numpy() for file in self._files]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def row(self, i: int) -> tuple[Any, int]:
        """The row group that holds row i, as an Arrow table of the wanted columns, and the row's place in it."""
        group = bisect_right(self._starts, i) - 1
        table = self._cache.get(group)
        if table is None:
            number, place = self._places[group]
            table = self._files[number].read_row_group(place, columns=self._wanted).combine_chunks()
            self._cache[group] = table
            if len(self._cache) > _CACHED_GROUPS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return table, i - self._starts[group]


def _array(table: Any, column: str, place: int) -> npt.NDArray[Any] | None:
    """One list of a list column, copied out, or None where it is null."""
    chunk = table.column(column).chunk(0)
    if not chunk[place].is_valid:
        return None
    begin, end = chunk.offsets[place].as_py(), chunk.offsets[place + 1].as_py()
    return chunk.values.slice(begin, end - begin).to_numpy().copy()


def _extra(table: Any, place: int) -> dict[str, Any]:
    text = table.column("extra")[place].as_py()
    return json.loads(text) if text else {}


class _Set:
    """What prompts and pairs share: rows within the length limits, in the order of the files."""

    _kind = ""
    _columns: ClassVar[list[str]] = []

    def __init__(self, folder: Path, limits: dict[str, int]) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        if self.manifest.kind != self._kind:
            raise UserError(f"{folder}: holds {self.manifest.kind}, not {self._kind}: prepare it with --kind {self._kind}")
        self._shards = _Shards(folder, self.manifest, self._columns)
        self._rows: npt.NDArray[np.int64] | None = None  # row numbers within the limits; None: all
        self.left_out = 0  # rows over the limits
        self._limits = {name: limit for name, limit in limits.items() if limit}
        self._limit()

    def _limit(self) -> None:
        fits = np.ones(self.manifest.rows, bool)
        for name, limit in self._limits.items():
            fits &= self._shards.column(name) <= limit
        if not fits.all():
            self._rows = np.flatnonzero(fits)
            self.left_out = int((~fits).sum())

    def __len__(self) -> int:
        return self.manifest.rows - self.left_out

    @property
    def fingerprint(self) -> str:
        """Stands for these very rows in this order, limits included."""
        if not self.left_out:
            return self.manifest.fingerprint
        text = json.dumps([self.manifest.fingerprint, sorted(self._limits.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def lengths(self, column: str = "prompt") -> npt.NDArray[np.int32]:
        """Tokens of each row's prompt (or chosen, rejected), [rows]."""
        whole = self._shards.column(f"{column}_tokens")
        return whole if self._rows is None else whole[self._rows]

    def _row(self, i: int) -> tuple[Any, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of a data set of {len(self)} rows")
        return self._shards.row(i if self._rows is None else int(self._rows[i]))


class PromptSet(_Set):
    """Prompts with the answers to judge by."""

    _kind = "prompts"
    _columns: ClassVar[list[str]] = ["prompt_ids", "answer", "extra"]

    @classmethod
    def open(cls, folder: str | Path, max_prompt_tokens: int = 0) -> PromptSet:
        """The prompts of a folder; those over the limit (0: none) are left out and counted in `left_out`. Raises UserError."""
        return cls(Path(folder), {"prompt_tokens": max_prompt_tokens})

    def prompt(self, i: int) -> Prompt:
        """Row i, from 0; its id is i."""
        table, place = self._row(i)
        ids = _array(table, "prompt_ids", place)
        assert ids is not None
        return Prompt(i, ids, table.column("answer")[place].as_py(), _extra(table, place))


@dataclass(slots=True)
class Pair:
    """One prompt with a chosen and a rejected answer. P, C, R: tokens of each.

    `roles` say what a token belongs to: 0 nothing that is trained on (other turns, the template's own tokens), 1 an earlier answer of
    the assistant, 2 its last answer.
    """

    id: int
    prompt: Int32Array  # [P]
    chosen: Int32Array  # [C]
    rejected: Int32Array  # [R]
    prompt_roles: RoleArray  # [P], 0 or 1
    chosen_roles: RoleArray  # [C]
    rejected_roles: RoleArray  # [R]
    extra: dict[str, Any] = field(default_factory=dict)

    def masks(self, train_on: str = "last_answer") -> tuple[FloatArray, FloatArray]:
        """Loss masks of chosen [C] and rejected [R]: 1 where trained on. `train_on`: last_answer or all_answers."""
        least = LAST_ANSWER if train_on == "last_answer" else EARLIER_ANSWER
        return tuple((roles >= least).astype(np.float32) for roles in (self.chosen_roles, self.rejected_roles))  # type: ignore[return-value]


class PairSet(_Set):
    """Preference pairs."""

    _kind = "pairs"
    _columns: ClassVar[list[str]] = ["prompt_ids", "prompt_roles", "chosen_ids", "chosen_roles", "rejected_ids", "rejected_roles", "extra"]

    @classmethod
    def open(cls, folder: str | Path, max_prompt_tokens: int = 0) -> PairSet:
        """The pairs of a folder; those whose prompt is over the limit (0: none) are left out and counted in `left_out`. Raises UserError."""
        return cls(Path(folder), {"prompt_tokens": max_prompt_tokens})

    def pair(self, i: int) -> Pair:
        """Row i, from 0; its id is i."""
        table, place = self._row(i)
        ids = {name: _array(table, f"{name}_ids", place) for name in ("prompt", "chosen", "rejected")}
        roles: dict[str, RoleArray] = {}
        for name, tokens in ids.items():
            given = _array(table, f"{name}_roles", place)
            assert tokens is not None
            roles[name] = np.full(len(tokens), 0 if name == "prompt" else LAST_ANSWER, np.uint8) if given is None else given
        return Pair(
            i, ids["prompt"], ids["chosen"], ids["rejected"],  # type: ignore[arg-type]
            roles["prompt"], roles["chosen"], roles["rejected"], _extra(table, place),
        )
