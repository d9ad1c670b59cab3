"""A model as it lies in files of any format: where each shard of each Megatron parameter is, and how to read and check it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.checkpoint.find import Checkpoint
from rlcli.checkpoint.regions import Region, read_region, same_bits
from rlcli.errors import UserError
from rlcli.models.layout import Layout
from rlcli.models.rules import Rule, lay
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

Shards = dict[int, list[Region]]  # tensor rank -> the places that hold this shard, more than one where ranks repeat it


@dataclass
class Stored:
    """A model in `folder`. `shards` has (parts, shards) for each rule by its name; `hf` has Regions by HF name instead (HF folders)."""

    format: str
    folder: Path
    spec: ModelSpec
    layout: Layout
    shards: dict[str, tuple[int, Shards]] = field(default_factory=dict)
    hf: dict[str, Region] = field(default_factory=dict)
    step: int | None = None
    ignored: list[str] = field(default_factory=list)  # names that hold nothing of the model
    checksums: dict[Path, str] = field(default_factory=dict)  # of files of weights, noted when they were written
    beside: dict[Path, str] = field(default_factory=dict)  # the same of configuration, tokenizer and what else stands beside them
    damaged: list[str] = field(default_factory=list)  # what is wrong with newer checkpoints of a run
    checkpoint: Checkpoint | None = None  # of a run, every checksum found right on opening

    def tensors(self, rule: Rule) -> list[torch.Tensor]:
        """The HF tensors of `rule`, in the order of its sources."""
        if self.hf:
            return [read_region(self.hf[source.name]) for source in rule.sources]
        return lay(rule, self.parts(rule))

    def parts(self, rule: Rule) -> list[torch.Tensor]:
        """The shards of `rule` in rank order, mapped; not for HF folders."""
        parts, shards = self.shards[rule.name]
        return [read_region(shards[rank][0]) for rank in range(parts)]

    def left_out(self) -> list[str]:
        """What the folder holds besides the model, in a few words each: names by their common beginning."""
        groups: dict[str, int] = {}
        for name in self.ignored:
            parts = name.split(".")
            stem = ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else name
            groups[stem] = groups.get(stem, 0) + 1
        return [f"{stem} ({count} tensors)" if count > 1 else stem for stem, count in groups.items()]

    def regions(self) -> Iterable[Region]:
        """Every place that holds weights."""
        yield from self.hf.values()
        for _, shards in self.shards.values():
            for replicas in shards.values():
                yield from replicas

    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, repeated shards counted once."""
        found: dict[str, int] = {}
        firsts = list(self.hf.values()) + [replicas[0] for _, shards in self.shards.values() for replicas in shards.values()]
        for region in firsts:
            found[region.dtype] = found.get(region.dtype, 0) + region.bytes
        return found

    def dtype(self, rule: Rule) -> str:
        """The dtype that `rule` is stored in."""
        if self.hf:
            return self.hf[rule.sources[0].name].dtype
        return next(iter(self.shards[rule.name][1].values()))[0].dtype

    def dtype_by_name(self) -> dict[str, str]:
        """The dtype of every HF tensor of the model, as it is stored."""
        rules = [rule for rule in self.spec.rules if not rule.copy]
        return {s.name: self.hf[s.name].dtype if self.hf else self.dtype(rule) for rule in rules for s in rule.sources}

    def check(self) -> None:
        """Every rule has all its shards, of the right shapes, in one dtype; UserError names the first that has not."""
        for rule in self.spec.rules:
            if self.hf:
                continue
            if rule.name not in self.shards:
                if rule.copy:
                    continue
                raise UserError(f"{self.folder}: {rule.name} is missing")
            self._check_shards(rule, *self.shards[rule.name])

    def _check_shards(self, rule: Rule, parts: int, shards: Shards) -> None:
        missing = [str(rank) for rank in range(parts) if rank not in shards]
        if missing:
            raise UserError(f"{self.folder}: {rule.name} lacks the shards of tensor ranks {', '.join(missing)} of {parts}")
        first = shards[0][0]
        for rank, replicas in shards.items():
            for region in replicas:
                fits = region.meant == first.meant if rule.order == "padded" else region.meant == rule.shape(parts)
                if rule.order == "padded":
                    fits = fits and region.meant[0] * parts >= rule.sources[0].shape[0] and region.meant[1:] == rule.sources[0].shape[1:]
                if not fits or rank >= parts:
                    raise UserError(f"{region.file}: {rule.name} is {list(region.meant)}, where config.json and {parts} shards make it {list(rule.shape(parts))}")
                if region.dtype != first.dtype:
                    raise UserError(f"{region.file}: {rule.name} is {region.dtype}, but {first.dtype} in {first.file}")

    def check_replicas(self, rule: Rule) -> None:
        """UserError where two places of one shard, or a tied head and its embedding, differ in a bit."""
        for rank, replicas in self.shards.get(rule.name, (0, {}))[1].items():
            first = read_region(replicas[0])
            for other in replicas[1:]:
                if not same_bits(first, read_region(other)):
                    raise UserError(f"{self.folder}: {rule.name} of tensor rank {rank} differs between {replicas[0].file} and {other.file}")
