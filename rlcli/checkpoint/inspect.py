"""What a folder holds, and whether it is whole: `msrl ckpt inspect` and `msrl ckpt verify` for models in any format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlcli.checkpoint.convert import Progress, check_copies, each
from rlcli.checkpoint.formats import open_stored
from rlcli.checkpoint.stored import Stored
from rlcli.errors import UserError
from rlcli.models.rules import Rule


@dataclass(frozen=True, slots=True)
class Description:
    """The facts that `inspect` prints."""

    format: str
    family: str
    step: int | None
    layout: str
    parameters: int
    dtypes: dict[str, int]  # bytes by dtype
    files: int
    bytes: int
    ignored: list[str]


def inspect(folder: Path, model: Path | None = None, extend: bool | None = None) -> Description:
    """Describe the model in `folder`, from headers alone; UserError where it is incomplete."""
    stored = open_stored(folder, None, model, extend)
    files = {region.file for region in stored.regions()}
    return Description(
        stored.format, stored.spec.family.name, stored.step, layout_text(stored), stored.spec.parameters, stored.dtypes(), len(files),
        sum(f.stat().st_size for f in files), stored.ignored,
    )


def layout_text(stored: Stored) -> str:
    """The layout in a few words."""
    if stored.format in ("hf", "torch_dist"):
        return "whole tensors, for any layout"
    at = stored.layout
    parts = [f"TP {at.tensor}", f"PP {at.pipeline}"]
    if at.virtual > 1:
        parts.append(f"VPP {at.virtual}")
    if at.stages:
        parts.append(f"layers {','.join(map(str, at.stages))}")
    if stored.spec.experts:
        parts += [f"EP {at.expert}", f"ETP {at.expert_tensor}"]
    return ", ".join(parts)


def verify_folder(folder: Path, model: Path | None = None, extend: bool | None = None, progress: Progress = lambda stage, done, total: None) -> int:
    """Read every weight: all there, shapes as config.json says, repeated ones equal, every number finite. Returns how many parameters there are."""
    import torch

    stored = open_stored(folder, None, model, extend)
    rules = [rule for rule in stored.spec.rules if not rule.copy]

    def check(rule: Rule) -> int:
        stored.check_replicas(rule)
        for source, tensor in zip(rule.sources, stored.tensors(rule), strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder}: {source.name} holds numbers that are not finite")
        return sum(t.numel() * t.element_size() for t in stored.tensors(rule))

    each(rules, check, "verify", 4, progress)
    check_copies(stored)
    return len(rules)
