"""Classic Megatron folders, as MindSpeed-RL and older Megatron-LM read and write them, read without running what is pickled in them.

    latest_checkpointed_iteration.txt
    iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    {"model" (or "model0", "model1" ...): state dict, "args": Namespace, ...}

PPP is there where PP > 1, EEE where EP > 1. Every folder repeats the dense weights of its (TT, PPP). Experts are found from the content:
split over TT; or dealt over EEE and TT, whole (moe_tp_extend_ep); or whole on the folders that expert tensor parallel size 1 leaves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcli.checkpoint.classic_names import canonical
from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.target import assets
from rlcli.checkpoint.unpickle import load_plain
from rlcli.errors import UserError
from rlcli.models.layout import Layout
from rlcli.models.megatron import local_name
from rlcli.models.registry import read_config
from rlcli.models.rules import FIRST, LAST, Rule
from rlcli.models.spec import ModelSpec

LATEST, FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"
_RANK = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")


@dataclass(slots=True)
class RankFile:
    """One mp_rank folder: its ranks, its state dict a chunk (raw names), and its other entries."""

    tensor: int
    pipeline: int
    expert: int
    path: Path
    chunks: list[dict[str, Any]]
    args: dict[str, Any]


def is_classic(folder: Path) -> bool:
    """Whether `folder` is a classic folder, or one iteration of it."""
    return (folder / LATEST).is_file() or any(_RANK.match(p.name) for p in folder.glob("mp_rank_*"))


def iteration_folder(folder: Path) -> tuple[Path, int | None]:
    """(the folder with the mp_rank folders, its iteration)."""
    if not (folder / LATEST).is_file():
        number = re.match(r"^iter_(\d+)$", folder.name)
        return folder, int(number.group(1)) if number else None
    text = (folder / LATEST).read_text(encoding="utf-8").strip()
    if text == "release":
        return folder / "release", None
    if not text.isdigit():
        raise UserError(f"{folder / LATEST}: holds {text[:40]!r}, no iteration number")
    return folder / f"iter_{int(text):07d}", int(text)


def open_classic(folder: Path, model: Path | None, extend: bool | None = None) -> Stored:
    """The model in a classic folder; `extend` says whether grouped experts are dealt over TP, where the files themselves do not."""
    spec = read_config(*assets(folder, model))
    where, step = iteration_folder(folder)
    files = _read_files(where)
    pipeline, tensor, expert = (max(getattr(f, k) for f in files) + 1 for k in ("pipeline", "tensor", "expert"))
    virtual = len(files[0].chunks)
    _check_args(where, files[0].args, {"tensor": tensor, "pipeline": pipeline, "expert": expert})
    states = [[canonical(c, spec, _expert_parts(f, tensor, spec, extend), str(f.path)) for c in f.chunks] for f in files]
    layout = Layout(tensor=tensor, pipeline=pipeline, virtual=virtual, expert=expert, expert_tensor=tensor)
    layout = replace(layout, stages=_stages(files, states, layout, spec))
    stored = Stored("classic", folder, spec, layout, step=step)
    deal = _deal(files, states, layout, spec)
    for file, chunks in zip(files, states, strict=True):
        for chunk, state in enumerate(chunks):
            at = replace(deal(file), tensor_rank=file.tensor, pipeline_rank=file.pipeline, chunk=chunk, stages=layout.stages)
            _take(stored, file, state, at)
    stored.layout = replace(deal(files[0]), tensor_rank=0, expert_rank=0, expert_tensor_rank=0, stages=_short(layout.stages))
    stored.check()
    return stored


def _check_args(folder: Path, args: dict[str, Any], found: dict[str, int]) -> None:
    """UserError where the writer noted more ranks than there are folders of; fewer are left to the checks of what is in them."""
    for kind, count in found.items():
        noted = args.get(f"{kind}_model_parallel_size")
        if isinstance(noted, int) and noted > count:
            raise UserError(f"{folder}: holds mp_rank folders of {count} {kind} parallel ranks where its files say {noted}; fetch those that are missing")


def _read_files(folder: Path) -> list[RankFile]:
    found = [(m, p) for p in sorted(folder.glob("mp_rank_*")) if (m := _RANK.match(p.name))]
    if not found:
        raise UserError(f"{folder}: has no mp_rank_* folders")
    files = []
    for match, path in found:
        loaded = load_plain(path / FILE)
        if not isinstance(loaded, dict):
            raise UserError(f"{path / FILE}: holds no checkpoint (a {type(loaded).__name__})")
        names = ["model"] if "model" in loaded else sorted((k for k in loaded if re.match(r"^model\d+$", str(k))), key=lambda k: int(k[5:]))
        chunks = [loaded[n] for n in names]
        if not chunks or not all(isinstance(c, dict) for c in chunks):
            raise UserError(f"{path / FILE}: holds no model state ({', '.join(map(str, loaded))[:80]})")
        args = loaded.get("args")
        numbers = [int(n) for n in match.groups() if n is not None]
        files.append(RankFile(numbers[0], numbers[1] if len(numbers) > 1 else 0, numbers[2] if len(numbers) > 2 else 0, path / FILE, chunks,
                              args if isinstance(args, dict) else {}))
    return _settle(files)


def _settle(files: list[RankFile]) -> list[RankFile]:
    """mp_rank_TT_NNN may mean PP or EP: every EP rank holds an embedding, of the PP ranks only the first does."""
    two = all(f.expert == 0 for f in files) and any(f.pipeline for f in files)
    if two and all(any("word_embeddings" in n for c in f.chunks for n in c) for f in files):
        for f in files:
            f.pipeline, f.expert = 0, f.pipeline
    return files


def _expert_parts(file: RankFile, tensor: int, spec: ModelSpec, extend: bool | None) -> int:
    """Ranks that grouped experts are split over. Their shape does not tell; what the writer noted in `args` does."""
    if tensor == 1 or not spec.experts or not any(re.search(r"mlp\.experts\.weight[12]$", n) for c in file.chunks for n in c):
        return 1
    noted = file.args.get("moe_tp_extend_ep")
    if noted is None and extend is None and file.args.get("expert_tensor_parallel_size") is None:
        raise UserError(f"{file.path}: does not say whether its grouped experts are split over TP or dealt (moe_tp_extend_ep); give --[no-]moe-tp-extend-ep")
    dealt = bool(noted if noted is not None else extend) or file.args.get("expert_tensor_parallel_size") == 1
    return 1 if dealt else tensor


def _local_layers(state: dict[str, Region]) -> int:
    return len({n.split(".")[2] for n in state if n.startswith("decoder.layers.")})


def _stages(files: list[RankFile], states: list[list[dict[str, Region]]], layout: Layout, spec: ModelSpec) -> tuple[int, ...]:
    """Layers of every pipeline chunk in model order."""
    counts: dict[tuple[int, int], int] = {}
    for file, chunks in zip(files, states, strict=True):
        for chunk, state in enumerate(chunks):
            counts[chunk, file.pipeline] = _local_layers(state)
    stages = tuple(counts.get((c, p), 0) for c in range(layout.virtual) for p in range(layout.pipeline))
    if sum(stages) != spec.layers:
        raise UserError(f"{files[0].path.parent.parent}: holds {sum(stages)} layers ({','.join(map(str, stages))}), where config.json has {spec.layers}")
    return stages


def _short(stages: tuple[int, ...]) -> tuple[int, ...]:
    """() where all chunks have the same number of layers."""
    return () if len(set(stages)) == 1 else stages


def _deal(files: list[RankFile], states: list[list[dict[str, Region]]], layout: Layout, spec: ModelSpec) -> Any:
    """A function from a rank file to the Layout of its experts, from how many it holds and how large they are."""
    held = {int(m.group(1)) for chunks in states for state in chunks for n in state if (m := re.search(r"local_experts\.(\d+)\.", n))}
    if not spec.experts or not held:
        return lambda file: replace(layout, expert=1, expert_tensor=1)
    count, tensor, expert = max(held) + 1, layout.tensor, layout.expert
    if tensor > 1 and count * expert * tensor == spec.experts:
        return lambda f: replace(layout, expert=expert * tensor, expert_rank=f.expert * tensor + f.tensor, expert_tensor=1)
    if count * expert != spec.experts:
        raise UserError(f"{files[0].path}: holds {count} experts a layer; {spec.experts} do not come out with EP {expert} and TP {tensor}")
    rows = next(r.meant[0] for chunks in states for state in chunks for n, r in state.items() if "local_experts" in n and "linear_fc1" in n)
    split = tensor if rows != 2 * spec.expert_ffn else 1
    return lambda f: replace(layout, expert=expert, expert_rank=f.expert, expert_tensor=split, expert_tensor_rank=f.tensor if split > 1 else 0)


def _take(stored: Stored, file: RankFile, state: dict[str, Region], at: Layout) -> None:
    """Enter one chunk's weights under their rules; UserError for what is missing or has no rule."""
    spec, left = stored.spec, dict(state)
    for rule in _expected(spec, at):
        name = local_name(rule, at.layers(spec.layers), at.experts(spec.experts) if spec.experts else range(0))
        region = left.pop(name, None)
        if region is None:
            if not rule.copy:
                raise UserError(f"{file.path}: {name} is missing")
            continue
        parts, rank = at.split(rule.expert is not None)
        if rule.axis is None or (rule.order != "padded" and region.meant == rule.shape(1)):
            parts, rank = 1, 0
        known, shards = stored.shards.setdefault(rule.name, (parts, {}))
        if known != parts:
            raise UserError(f"{file.path}: {name} is split over {parts} ranks here and over {known} elsewhere")
        shards.setdefault(rank, []).append(region)
    if left:
        raise UserError(f"{file.path}: holds {sorted(left)[0]}, which a {spec.family.name} model of this config.json does not have")


def _expected(spec: ModelSpec, at: Layout) -> list[Rule]:
    """The rules of one chunk, a tied head's copy among them wherever it may stand."""
    experts = at.experts(spec.experts) if spec.experts else range(0)
    rules = [r for layer in at.layers(spec.layers) for e in (None, *experts) for r in spec.placed.get((layer, e), [])]
    return (spec.placed[FIRST, None] if at.is_first else []) + rules + (spec.placed[LAST, None] if at.is_last else [])
