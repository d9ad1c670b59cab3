"""msrl's own Megatron layout: one safetensors file for each rank's dense weights and one for each rank's experts, and a JSON manifest.

    manifest.json                     format, version, layout, family, step, and each file's size
    dense.tp00.pp000.safetensors      parameters by their Megatron name with global layer numbers
    expert.ep000.etp00.pp000.safetensors
    hf/                               config.json and tokenizer

No weight is in two files (a tied head's copy apart), whatever expert and tensor parallelism are.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlcli.checkpoint.disk import hash_file, write_file
from rlcli.checkpoint.regions import SIZES, Region
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.sums import read_sums, write_sums
from rlcli.checkpoint.target import HF_FOLDER, MARK, Slot, Target, assets, copy_companions
from rlcli.errors import UserError
from rlcli.models.files import FLOATS, make_header, read_header, read_json
from rlcli.models.layout import Layout, ranks
from rlcli.models.megatron import local_rules
from rlcli.models.registry import read_config
from rlcli.models.rules import Rule

FORMAT, VERSION, MANIFEST = "msrl-mcore", 1, "manifest.json"
CODES = {v: k for k, v in FLOATS.items()}


def file_of(rule: Rule, at: Layout) -> str:
    """Name of the file that holds `rule`'s shard of the rank `at`."""
    if rule.expert is not None:
        return f"expert.ep{at.expert_rank:03d}.etp{at.expert_tensor_rank:02d}.pp{at.pipeline_rank:03d}.safetensors"
    return f"dense.tp{at.tensor_rank:02d}.pp{at.pipeline_rank:03d}.safetensors"


def contents(spec: Any, layout: Layout) -> dict[str, dict[str, tuple[Rule, int, int]]]:
    """File name -> parameter name -> (rule, parts, rank)."""
    files: dict[str, dict[str, tuple[Rule, int, int]]] = {}
    dense = replace(layout, expert=max(spec.experts, 1), expert_tensor=1)  # the first rank's experts are dropped: one here
    for at in ranks(replace(layout, expert=1, expert_tensor=1)):
        for rule in local_rules(spec, replace(dense, **{k: getattr(at, k) for k in ("tensor_rank", "pipeline_rank", "chunk")})).values():
            if rule.expert is None:
                files.setdefault(file_of(rule, at), {})[rule.name] = (rule, *at.split(False))
    for at in ranks(replace(layout, tensor=1)) if spec.experts else ():
        for rule in local_rules(spec, at).values():
            if rule.expert is not None:
                files.setdefault(file_of(rule, at), {})[rule.name] = (rule, *at.split(True))
    return files


class ShardedTarget(Target):
    """Writes this layout."""

    format = "mcore"

    def bytes(self) -> int:
        total = 0
        for rules in contents(self.spec, self.layout).values():
            for rule, parts, _ in rules.values():
                total += Region(self.folder, self.dtype_of(rule), rule.shape(parts), 0).bytes
        return total

    def prepare(self) -> None:
        for name, rules in contents(self.spec, self.layout).items():
            listed = [(key, CODES[self.dtype_of(rule)], rule.shape(parts)) for key, (rule, parts, _) in rules.items()]
            head, places = make_header(listed)
            with open(self.partial / name, "wb") as f:
                f.write(head)
                f.truncate(max(stop for _, stop in places.values()))
            for key, (rule, parts, rank) in rules.items():
                region = Region(self.partial / name, self.dtype_of(rule), rule.shape(parts), places[key][0])
                self.slots.setdefault(rule.name, []).append(Slot(region, parts, rank))

    def close(self) -> None:
        copy_companions(self.spec, self.partial / HF_FOLDER)
        self._note(self.partial, {p.name: {"bytes": p.stat().st_size} for p in sorted(self.partial.glob("*.safetensors"))})

    def seal(self) -> None:
        paths = sorted(self.partial.glob("*.safetensors"))
        with ThreadPoolExecutor(4) as pool:  # read back from the page cache
            seen = list(pool.map(hash_file, paths))
        self._note(self.partial, {p.name: dict(zip(("bytes", "sha256"), facts, strict=True)) for p, facts in zip(paths, seen, strict=True)})
        write_sums(self.partial, ["*.safetensors", MANIFEST, MARK])  # what stands beside the weights

    def _note(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        sizes = {k: v for k, v in asdict(self.layout).items() if not k.endswith("_rank") and k != "chunk"}
        manifest = {"format": FORMAT, "version": VERSION, "family": self.spec.family.name, "step": self.step, "layout": sizes, "files": files}
        beside = folder / f"{MANIFEST}.partial"
        write_file(beside, (json.dumps(manifest, indent=2) + "\n").encode())
        os.replace(beside, folder / MANIFEST)


def is_sharded(folder: Path) -> bool:
    """Whether `folder` is of this layout."""
    return (folder / MANIFEST).is_file() and read_json(folder / MANIFEST).get("format") == FORMAT


def open_sharded(folder: Path, model: Path | None) -> Stored:
    """The model in `folder`; UserError for a newer version, and for files that are missing, truncated or not as the layout asks."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("version") != VERSION:
        raise UserError(f"{folder / MANIFEST}: version {manifest.get('version')} is not known (only {VERSION}); it was written by another msrl")
    try:
        sizes = dict(manifest["layout"])
        layout = Layout(**{**sizes, "stages": tuple(sizes.get("stages") or ())})
        if not all(isinstance(n, int) and n > 0 for n in (layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor, layout.virtual)):
            raise ValueError(f"sizes must be whole numbers from 1 on, not {sizes}")
        noted = {name: {"bytes": int(entry["bytes"]), "sha256": entry.get("sha256")} for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{folder / MANIFEST}: has no valid layout or list of files ({type(e).__name__}: {e})") from None
    spec = replace(read_config(*assets(folder, model)), tensors={})
    stored = Stored("mcore", folder, spec, layout, step=manifest.get("step"))
    stored.beside = read_sums(folder)
    wanted = contents(spec, layout)
    stored.checksums = {folder / name: entry["sha256"] for name, entry in noted.items() if name in wanted and isinstance(entry["sha256"], str)}
    for name, rules in wanted.items():
        _read_file(stored, folder / name, rules, noted.get(name, {}))
    strange = sorted({p.name for p in folder.glob("*.safetensors")} - wanted.keys())
    if strange:
        raise UserError(f"{folder / strange[0]}: belongs to no rank of the layout in {MANIFEST}")
    stored.check()
    return stored


def _read_file(stored: Stored, path: Path, rules: dict[str, tuple[Rule, int, int]], noted: dict[str, Any]) -> None:
    infos = read_header(path)
    if noted.get("bytes") not in (None, path.stat().st_size):
        raise UserError(f"{path}: has {path.stat().st_size} bytes where {MANIFEST} says {noted['bytes']}")
    if infos.keys() != rules.keys():
        lone = sorted(infos.keys() ^ rules.keys())
        raise UserError(f"{path}: {lone[0]} is {'superfluous' if lone[0] in infos else 'missing'}")
    for key, (rule, parts, rank) in rules.items():
        info = infos[key]
        dtype = FLOATS.get(info.dtype)
        if dtype not in SIZES:
            raise UserError(f"{path}: {key} has dtype {info.dtype}")
        region = Region(path, dtype, info.shape, info.start)
        stored.shards.setdefault(rule.name, (parts, {}))[1].setdefault(rank, []).append(region)
