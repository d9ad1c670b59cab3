"""Megatron's distributed checkpoints ("torch_dist", over torch.distributed.checkpoint), read and written in one process without Megatron.

    metadata.json, common.pt      Megatron's description and what every rank shares
    .metadata                     a pickle: for each tensor its global shape, chunks, and where each lies (read by the restricted unpickler)
    __0_0.distcp ...              each chunk as torch.save writes it

Tensors are stored whole, whatever the layout of training was: layers stacked along a first axis where all are of a kind, experts likewise.
The names are those of Megatron-core's sharded state dicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.checkpoint.frames import Frame
from rlcli.checkpoint.regions import Region, read_region
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.target import assets
from rlcli.checkpoint.unpickle import DtypeMark, load_pickle, load_plain
from rlcli.errors import UserError
from rlcli.models.files import read_json
from rlcli.models.layout import Layout
from rlcli.models.registry import read_config
from rlcli.models.rules import Rule
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

METADATA, CONFIG, COMMON = ".metadata", "metadata.json", "common.pt"
_DCP = "torch.distributed.checkpoint."
RECORDS = tuple(_DCP + n for n in (
    "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorStorageMetadata", "metadata.ChunkStorageMetadata", "metadata.TensorProperties",
    "metadata.BytesStorageMetadata", "filesystem._StorageInfo", "metadata.StorageMeta"))
_EXPERT = re.compile(r"^(.*mlp\.experts\.)local_experts\.(\d+)\.(.*)$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_FUSED = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
_MLA_FUSED = {"self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
              "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight"}


@dataclass(frozen=True, slots=True)
class Key:
    """A parameter's place: the tensor's name, its index along the stacked first axes, and the sizes of these."""

    name: str
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a stored tensor: offsets and sizes in it, and where its record is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(slots=True)
class Entry:
    """A stored tensor: its global shape, dtype and chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[Chunk]
    _at: dict[int, dict[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def reaching(self, index: tuple[int, ...]) -> list[Chunk]:
        """The chunks that hold a part of what stands at `index` of the first axes; of all, where none is given."""
        lead = len(index)
        if not lead:
            return self.chunks
        if lead not in self._at:  # stacked experts have a chunk for each layer, expert and rank: looked up, not searched
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.chunks:
                for at in product(*(range(o, o + s) for o, s in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True))):
                    found.setdefault(at, []).append(chunk)
            self._at[lead] = found
        return self._at[lead].get(index, [])


def keys_of(rule: Rule, spec: ModelSpec) -> list[Key]:
    """Where `rule` may be stored, the way that Megatron's own local layer spec writes it first."""
    expert, name = _EXPERT.match(rule.name), rule.name
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    if expert:
        name, index, counts = f"{expert.group(1)}experts.{expert.group(3)}", (int(expert.group(2)),), (spec.experts,)
    layer = _LAYER.match(name)
    if not layer:
        return [Key(name)]
    plain = layer.group(2)
    mla = bool(spec.transformer.get("multi_latent_attention"))
    fused = {**_FUSED, **(_MLA_FUSED if mla else {})}.get(plain)
    names = [plain] if fused is None else [plain, fused] if mla else [fused, plain]
    number = int(layer.group(1))
    each = [Key(f"decoder.layers.{number}.{n}", index, counts) for n in names]
    stacked = [Key(f"decoder.layers.{n}", (number, *index), (spec.layers, *counts)) for n in names]
    return each + stacked if "moe_layer_freq" in spec.transformer else stacked + each


def is_dist(folder: Path) -> bool:
    """Whether `folder` is a distributed checkpoint."""
    return (folder / METADATA).is_file() and (folder / CONFIG).is_file()


def find_dist(folder: Path) -> Path | None:
    """`folder` itself, or its newest iteration by latest_checkpointed_iteration.txt, where that is a distributed checkpoint."""
    if is_dist(folder):
        return folder
    latest = folder / "latest_checkpointed_iteration.txt"
    text = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    inner = folder / (f"iter_{int(text):07d}" if text.isdigit() else "release")
    return inner if text and is_dist(inner) else None


def read_metadata(folder: Path) -> dict[str, Entry]:
    """Every stored tensor; UserError where a chunk has no place, or files are missing or too short."""
    backend = read_json(folder / CONFIG).get("sharded_backend")
    if backend != "torch_dist":
        raise UserError(f"{folder / CONFIG}: sharded_backend {backend!r} is not supported (only torch_dist)")
    metadata = load_pickle(folder / METADATA, RECORDS)
    try:
        _check_files(folder, metadata["storage_data"].values())
        places = {(i["fqn"], tuple(i["offset"])): s for i, s in metadata["storage_data"].items() if i.get("offset") is not None}
        return {n: _entry(folder, n, t, places) for n, t in metadata["state_dict_metadata"].items() if "chunks" in t}
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise UserError(f"{folder / METADATA}: is not the description of a distributed checkpoint ({type(e).__name__}: {e})") from None


def _check_files(folder: Path, places: Iterable[Mapping[str, Any]]) -> None:
    """Every record, those of objects too, lies within a file of this folder."""
    ends: dict[str, int] = {}
    for place in places:
        file = place["relative_path"]
        ends[file] = max(ends.get(file, 0), int(place["offset"]) + int(place["length"]))
    for file, end in ends.items():
        if Path(file).name != file:
            raise UserError(f"{folder / METADATA}: names the file {file!r} outside the folder")
        if not (folder / file).exists():
            raise UserError(f"{folder / file}: file is missing")
        size = (folder / file).stat().st_size
        if size < end:
            raise UserError(f"{folder / file}: truncated, {size} bytes where {METADATA} places {end}; fetch the file again")


def _entry(folder: Path, name: str, tensor: Mapping[str, Any], places: Mapping[Any, Any]) -> Entry:
    dtype = tensor["properties"]["state"][0]
    if not isinstance(dtype, DtypeMark):
        raise UserError(f"{folder / METADATA}: {name} has an unknown dtype")
    chunks = []
    for chunk in tensor["chunks"]:
        place = places.get((name, tuple(chunk["offsets"])))
        if place is None:
            raise UserError(f"{folder / METADATA}: a chunk of {name} has no place")
        file = place["relative_path"]
        chunks.append(Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), file, int(place["offset"]), int(place["length"])))
    return Entry(tuple(tensor["size"]), dtype.name, chunks)


class Records:
    """The records of the distributed checkpoint in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._frames: dict[tuple[tuple[int, ...], str, int], Frame] = {}

    def region(self, chunk: Chunk, entry: Entry) -> Region:
        """Where a chunk's bytes are; UserError where its record is not what the description says."""
        path, kind = self.folder / chunk.file, (chunk.sizes, entry.dtype, chunk.length)
        region = self._frames[kind].find(path, chunk.start) if kind in self._frames else None
        if region is None:
            region = load_plain(path, chunk.start, chunk.length)
            if not isinstance(region, Region) or region.meant != chunk.sizes or region.dtype != entry.dtype:
                raise UserError(f"{path}: the record at {chunk.start} is not the tensor that {METADATA} describes")
            self._frames[kind] = Frame.around(region, chunk.start, chunk.length)
        return region


@dataclass
class DistStored(Stored):
    """A distributed checkpoint as a source."""

    entries: dict[str, Entry] | None = None
    records: Records | None = None

    def key(self, rule: Rule) -> Key | None:
        """Where `rule` lies."""
        assert self.entries is not None
        return next((k for k in keys_of(rule, self.spec) if k.name in self.entries), None)

    def whole(self, rule: Rule) -> torch.Tensor:
        """The unsharded Megatron parameter, put together from its chunks."""
        import torch

        key = self.key(rule)
        assert key is not None
        assert self.entries is not None
        entry, lead = self.entries[key.name], len(key.index)
        shape, pieces = entry.shape[lead:], self._chunks(key)
        if len(pieces) == 1:
            return self._read(pieces[0], entry).reshape(shape) if pieces[0].sizes[:lead] == (1,) * lead else self._part(pieces[0], entry, key)
        whole = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        for piece in pieces:
            target = whole
            for axis, (offset, size) in enumerate(zip(piece.offsets[lead:], piece.sizes[lead:], strict=True)):
                target = target.narrow(axis, offset, size)
            target.copy_(self._part(piece, entry, key))
        return whole

    def _chunks(self, key: Key) -> list[Chunk]:
        """The chunks that hold a part of the parameter."""
        assert self.entries is not None
        return self.entries[key.name].reaching(key.index)

    def _part(self, chunk: Chunk, entry: Entry, key: Key) -> torch.Tensor:
        tensor = self._read(chunk, entry)
        for i, offset in zip(key.index, chunk.offsets, strict=False):
            tensor = tensor[i - offset]
        return tensor

    def _read(self, chunk: Chunk, entry: Entry) -> torch.Tensor:
        assert self.records is not None
        return read_region(self.records.region(chunk, entry))

    def parts(self, rule: Rule) -> list[torch.Tensor]:
        return [self.whole(rule)]

    def regions(self) -> list[Region]:
        assert self.records is not None
        assert self.entries is not None
        keys = [key for rule in self.spec.rules if (key := self.key(rule))]
        return [self.records.region(chunk, self.entries[key.name]) for key in keys for chunk in self._chunks(key)]

    def dtype(self, rule: Rule) -> str:
        key = self.key(rule)
        return (self.entries or {})[key.name].dtype if key else "float32"

    def dtypes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for rule in self.spec.rules:
            if not rule.copy and (key := self.key(rule)):
                region = Region(self.folder, self.dtype(rule), (self.entries or {})[key.name].shape[len(key.index):], 0)
                found[region.dtype] = found.get(region.dtype, 0) + region.bytes
        return found

    def check(self) -> None:
        """Every parameter is there with its shape and fully covered by chunks; nothing else of the model is."""
        entries, used = self.entries or {}, set()
        for rule in self.spec.rules:
            key = self.key(rule)
            if key is None:
                if rule.copy:
                    continue
                raise UserError(f"{self.folder}: {rule.name} is missing")
            used.add(key.name)
            _check_entry(self.folder, rule, key, entries[key.name], self._chunks(key))
        strange = [n for n in entries if n not in used and n.startswith(("decoder.", "embedding.", "output_layer."))]
        if strange:
            raise UserError(f"{self.folder}: holds {strange[0]}, which a {self.spec.family.name} model of this config.json does not have")
        self.ignored = sorted({n.split(".")[0] for n in entries if n not in used})


def _check_entry(folder: Path, rule: Rule, key: Key, entry: Entry, chunks: list[Chunk]) -> None:
    lead, want = len(key.index), rule.shape(1)
    shape = entry.shape[lead:]
    padded = rule.order == "padded" and len(shape) == len(want) and shape[0] >= want[0] and shape[1:] == want[1:]
    if entry.shape[:lead] != key.counts or not (shape == want or padded):
        raise UserError(f"{folder}: {key.name} is {list(entry.shape)}, where config.json makes it {[*key.counts, *want]}")
    covered = 0
    for chunk in chunks:
        size = 1
        for n in chunk.sizes[lead:]:
            size *= n
        covered += size
    total = 1
    for n in shape:
        total *= n
    if covered != total:
        raise UserError(f"{folder}: the chunks of {key.name} cover {covered} of {total} values")


def open_dist(folder: Path, model: Path | None) -> DistStored:
    """The model in a distributed checkpoint, checked from its description."""
    inner = find_dist(folder)
    assert inner is not None
    spec = read_config(*assets(folder if model or (folder / "hf").is_dir() else inner, model))
    number = re.match(r"^iter_(\d+)$", inner.name)
    stored = DistStored("torch_dist", folder, spec, Layout(), step=int(number.group(1)) if number else None, entries=read_metadata(inner), records=Records(inner))
    stored.check()
    return stored
