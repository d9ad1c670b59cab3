"""What a folder holds, and whether it is whole: `msrl ckpt inspect` and `msrl ckpt verify` for models in any format."""

from __future__ import annotations

from pathlib import Path

from rlcli.checkpoint import find
from rlcli.checkpoint.convert import Progress, check_copies, check_sums, each, threads_by_default
from rlcli.checkpoint.find import Checkpoint
from rlcli.checkpoint.formats import open_stored
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.sums import files_text, size_text
from rlcli.errors import UserError
from rlcli.models.rules import Rule


def inspect(folder: Path, model: Path | None = None, extend: bool | None = None) -> list[tuple[str, str]]:
    """(what, value) for each line about the model in `folder`, from headers alone; UserError where it is incomplete."""
    stored = open_stored(folder, None, model, extend)
    files = {region.file for region in stored.regions()}
    dtypes = stored.dtypes()
    lines = [
        ("format", stored.format),
        ("family", f"{stored.spec.family.name} ({', '.join(stored.spec.config.get('architectures', []))})"),
        ("layout", layout_text(stored)),
        *(_run_lines(stored.checkpoint) if stored.checkpoint else [("step", "-" if stored.step is None else str(stored.step))]),
        ("parameters", f"{stored.spec.parameters:,}" + (", head tied to the embedding" if stored.spec.tied else "")),
        ("dtype", ", ".join(f"{name} {count / sum(dtypes.values()):.0%}" if len(dtypes) > 1 else name for name, count in dtypes.items())),
        ("weights", f"{size_text(sum(dtypes.values()))} in {files_text(len(files))} of {size_text(sum(f.stat().st_size for f in files))}"),
        ("checksums", _checksum_state(stored)),
    ]
    lines += [("damaged", text.partition("checkpoint ")[2]) for text in stored.damaged]
    return lines + [("also there" if stored.format == "run" else "left out", line) for line in stored.left_out()]


def _run_lines(found: Checkpoint) -> list[tuple[str, str]]:
    """What the manifest of a run's checkpoint says of the run."""
    manifest, steps = found.manifest, found.manifest.config.get("train", {}).get("steps")
    counted = "pairs" if manifest.kind == "dpo" else "prompts"
    shown = [name for name in manifest.metrics if name.startswith("eval/")] or list(manifest.metrics)
    metrics = ", ".join(f"{name} {manifest.metrics[name]:.4g}" for name in shown[:3])
    return [
        ("checkpoint", str(found.path)),
        ("step", f"{manifest.step} of {steps}" if steps else str(manifest.step)),
        ("run", f"{manifest.kind}, {manifest.consumed:,} {counted} consumed"),
        ("saved", f"{manifest.created} by msrl {manifest.versions.get('msrl', '?')}"),
        ("to resume", "yes" if manifest.optimizer else "no: the optimizer was not saved"),
        *([("metrics", metrics)] if metrics else []),
    ]


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
    if stored.checkpoint is not None:
        return f"of {files_text(len(stored.checkpoint.manifest.files))}, all right"
    noted = len(stored.checksums) + len(stored.beside)
    return f"of {files_text(noted)}, not checked here (msrl ckpt verify does)" if noted else "none noted"


def _older(folder: Path, newest: Checkpoint) -> int:
    """Files of a run's checkpoints whose checksums are right: of `newest`, found so when it was opened, and of those before it if all are meant."""
    alone = folder.resolve() == newest.path.resolve()
    others = [] if alone else [c for c in find.complete(newest.path.parent) if c.path != newest.path]
    for checkpoint in others:
        if faults := find.verify(checkpoint.path):
            raise UserError(f"{checkpoint.path}: is damaged ({faults[0]}); {newest.path.name} is whole: remove what is damaged")
    return sum(len(checkpoint.manifest.files) for checkpoint in [newest, *others])


def verify_folder(
    folder: Path, model: Path | None = None, extend: bool | None = None, progress: Progress = lambda stage, done, total: None
) -> list[str]:
    """Read every weight and check it; returns a line for each thing found right.

    UserError names the first that is not: missing, of another shape than config.json says, different where ranks repeat it, not finite,
    or in a file with another checksum than was noted.
    """
    import torch

    stored = open_stored(folder, None, model, extend)
    if stored.damaged and stored.checkpoint:
        raise UserError(f"{folder}: {'; '.join(stored.damaged)} ({stored.checkpoint.path.name}, which is whole); remove what is damaged")
    noted = _older(folder, stored.checkpoint) if stored.checkpoint else check_sums(stored, progress, beside=model is None)
    rules, total = [rule for rule in stored.spec.rules if not rule.copy], sum(stored.dtypes().values())

    def check(rule: Rule) -> int:
        stored.check_replicas(rule)
        count = 0
        for source, tensor in zip(rule.sources, stored.tensors(rule), strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder}: {source.name} holds numbers that are not finite")
            count += tensor.numel() * tensor.element_size()
        return count

    each(rules, check, "verify", threads_by_default(), lambda stage, now, _: progress(stage, now, total))
    check_copies(stored)
    lines = [f"{stored.format}: all {len(rules)} parameters of {stored.spec.family.name} are there, in shape and finite"]
    return lines + ([f"checksums right: {files_text(noted)}"] if noted else [])
