"""What a folder holds, and whether it is whole: `msrl ckpt inspect` and `msrl ckpt verify` for models in any format."""

from __future__ import annotations

from pathlib import Path

from rlcli.checkpoint import find, sharded
from rlcli.checkpoint.convert import Progress, check_copies, each
from rlcli.checkpoint.disk import hash_file
from rlcli.checkpoint.formats import open_stored
from rlcli.checkpoint.stored import Stored
from rlcli.errors import UserError
from rlcli.models.files import read_json
from rlcli.models.rules import Rule


def inspect(folder: Path, model: Path | None = None, extend: bool | None = None) -> list[tuple[str, str]]:
    """(what, value) for each line about the model in `folder`, from headers alone; UserError where it is incomplete."""
    stored = open_stored(folder, None, model, extend)
    files = {region.file for region in stored.regions()}
    size = sum(f.stat().st_size for f in files)
    dtypes = stored.dtypes()
    lines = [
        ("format", stored.format),
        ("family", f"{stored.spec.family.name} ({', '.join(stored.spec.config.get('architectures', []))})"),
        ("layout", layout_text(stored)),
        ("step", "-" if stored.step is None else str(stored.step)),
        ("parameters", f"{stored.spec.parameters:,}" + (", head tied to the embedding" if stored.spec.tied else "")),
        ("dtype", ", ".join(f"{name} {count / sum(dtypes.values()):.0%}" if len(dtypes) > 1 else name for name, count in dtypes.items())),
        ("files", f"{len(files)}, {size / 2**30:.2f} GiB"),
        ("checksums", _checksum_state(stored)),
    ]
    return lines + [("left out", line) for line in stored.left_out()]


def layout_text(stored: Stored) -> str:
    """The layout in a few words."""
    if stored.format in ("hf", "torch_dist", "run"):
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


def _checksum_state(stored: Stored) -> str:
    noted = len(_noted(stored))
    return f"{noted} files, not checked here (msrl ckpt verify does)" if noted else "none in this format"


def _noted(stored: Stored) -> dict[Path, str]:
    """The checksums that were noted when the folder was written."""
    if stored.format == "run":
        checkpoint = find.resolve(stored.folder.parent)
        return {checkpoint.path / name: entry.sha256 for name, entry in checkpoint.manifest.files.items()}
    if stored.format == "mcore":
        files = read_json(stored.folder / sharded.MANIFEST).get("files", {})
        return {stored.folder / name: entry["sha256"] for name, entry in files.items() if entry.get("sha256")}
    return {}


def verify_folder(
    folder: Path, model: Path | None = None, extend: bool | None = None, progress: Progress = lambda stage, done, total: None
) -> list[str]:
    """Read every weight and check it; returns a line for each thing found right.

    UserError names the first that is not: missing, of another shape than config.json says, different where ranks repeat it, not finite,
    or in a file with another checksum than was noted.
    """
    import torch

    stored = open_stored(folder, None, model, extend)
    noted = _noted(stored)
    for path, checksum in noted.items():
        if not path.is_file():
            raise UserError(f"{path}: file is missing")
        if hash_file(path)[1] != checksum:
            raise UserError(f"{path}: differs from its checksum; its content was changed after it was written")
    rules, total = [rule for rule in stored.spec.rules if not rule.copy], sum(stored.dtypes().values())

    def check(rule: Rule) -> int:
        stored.check_replicas(rule)
        count = 0
        for source, tensor in zip(rule.sources, stored.tensors(rule), strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder}: {source.name} holds numbers that are not finite")
            count += tensor.numel() * tensor.element_size()
        return count

    each(rules, check, "verify", 4, lambda stage, now, _: progress(stage, now, total))
    check_copies(stored)
    lines = [f"{stored.format}: all {len(rules)} parameters of {stored.spec.family.name} are there, in shape and finite"]
    return lines + ([f"checksums of {len(noted)} files are right"] if noted else [])
