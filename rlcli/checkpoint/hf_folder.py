"""HF folders as source and target of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.target import Target
from rlcli.models.export import HfWriter
from rlcli.models.files import FLOATS
from rlcli.models.layout import Layout
from rlcli.models.registry import ignored, read_model
from rlcli.models.rules import Rule, pieces

if TYPE_CHECKING:
    import torch


def open_hf(folder: Path, tokenizer: bool = True, unfinished: bool = False) -> Stored:
    """The model in a HF folder, checked from its headers."""
    spec = read_model(folder, tokenizer, training=False, unfinished=unfinished)
    regions = {n: Region(i.file, FLOATS[i.dtype], i.shape, i.start) for n, i in spec.tensors.items() if i.dtype in FLOATS and not ignored(spec, n)}
    return Stored("hf", folder, spec, Layout(), hf=regions, ignored=[n for n in spec.tensors if ignored(spec, n)])


class HfTarget(Target):
    """Writes a HF folder that transformers and vLLM load as it is."""

    format = "hf"

    def bytes(self) -> int:
        return self._make().bytes

    def _make(self) -> HfWriter:
        names = {s.name: self.dtype_of(rule, i) for rule in self.spec.rules if not rule.copy for i, s in enumerate(rule.sources)}
        return HfWriter(self.spec, self.folder, None if self.dtype == "keep" else self.dtype, dtypes=names)

    def prepare(self) -> None:
        self.hf = self._make()
        self.hf.lay_out()

    def _place(self, rule: Rule, source: int) -> Region:
        wanted = rule.sources[source]
        file, start, _ = self.hf.places[wanted.name]
        return Region(self.partial / file, FLOATS[self.hf.code[wanted.name]], wanted.shape, start)

    def put(self, rule: Rule, tensors: list[torch.Tensor]) -> None:
        for i, tensor in enumerate(tensors if not rule.copy else ()):
            self.writer.write_rows(self._place(rule, i), 0, tensor)

    def put_parts(self, rule: Rule, shards: list[torch.Tensor]) -> None:
        """Straight from where the shards lie: rows as they are, columns joined for a few rows at a time."""
        if rule.copy:
            return
        if not rule.axis or len(shards) == 1:
            for i, start, piece in pieces(rule, shards):
                self.writer.write_rows(self._place(rule, i), 0 if rule.axis else start, piece)
        else:
            self.writer.write_columns(self._place(rule, 0), [piece for _, _, piece in pieces(rule, shards)])
