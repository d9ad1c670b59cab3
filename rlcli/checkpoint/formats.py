"""Which format a folder is in, and opening it."""

from __future__ import annotations

from pathlib import Path

from rlcli.checkpoint import find
from rlcli.checkpoint.classic import is_classic, open_classic
from rlcli.checkpoint.dist_format import find_dist, open_dist
from rlcli.checkpoint.hf_folder import open_hf
from rlcli.checkpoint.sharded import MANIFEST, is_sharded, open_sharded
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.sums import is_weights, read_sums
from rlcli.checkpoint.target import HF_FOLDER
from rlcli.errors import UserError
from rlcli.models.unfinished import refuse_unfinished

FORMATS = ("hf", "mcore", "torch_dist", "classic", "run")
RUN_MODEL = "model"  # folder of a run's checkpoint that holds the weights


def detect(folder: Path) -> str:
    """The format of `folder`; UserError where it is none that is known."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if is_run(folder):
        return "run"
    if is_sharded(folder):
        return "mcore"
    if find_dist(folder):
        return "torch_dist"
    if is_classic(folder):
        return "classic"
    if (folder / HF_FOLDER).is_dir() and any(folder.glob("dense.tp*.safetensors")):
        raise UserError(f"{folder / MANIFEST}: file is missing; without it the folder's layout is not known")
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return "hf"
    raise UserError(f"{folder}: holds no model (no HF folder, msrl mcore folder, Megatron torch_dist or classic checkpoint)")


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run's folder, its checkpoints folder, or one of its checkpoints."""
    named = (folder / find.FOLDER).is_dir() or any(find.COMPLETE.fullmatch(p.name) for p in folder.glob("step-*"))
    single = (folder / RUN_MODEL).is_dir() and ((folder / MANIFEST).is_file() or find.COMPLETE.fullmatch(folder.name) is not None)
    return named or single  # one checkpoint may have been given another name, and may have lost its manifest


def open_run(folder: Path, model: Path | None) -> Stored:
    """The weights of a run's newest good checkpoint, or of the one named; the architecture is that of the run's model folder."""
    damaged: list[str] = []
    checkpoint = find.resolve(folder, damaged.append)
    named = checkpoint.manifest.config.get("model")
    if model is None and not (isinstance(named, str) and (Path(named) / "config.json").is_file()):
        raise UserError(f"{checkpoint.path}: the run's model folder {named} is not there; name it with --model")
    stored = open_dist(checkpoint.path / RUN_MODEL, model or Path(str(named)))
    stored.format, stored.step, stored.checkpoint, stored.damaged = "run", checkpoint.step, checkpoint, damaged
    return stored


def open_stored(
    folder: Path, named: str | None = None, model: Path | None = None, extend: bool | None = None, unfinished: bool = False
) -> Stored:
    """The model in `folder`. `named`: the format it must be in ("mcore" serves every Megatron format); `model`: a HF folder for config.json.

    `unfinished`: the folder may be one that its writer has not named yet.
    """
    if named is not None and named not in FORMATS:
        raise UserError(f"--from {named}: no such format (only {', '.join(FORMATS)})")
    for given in () if unfinished else filter(None, (folder, model)):
        refuse_unfinished(given)
    found = detect(folder)
    if named and named != found and not (named == "mcore" and found != "hf"):
        raise UserError(f"{folder}: is in the format {found}, not {named}; leave --from out to read whatever a folder holds")
    if found == "run":
        return open_run(folder, model)
    if found == "mcore":
        return open_sharded(folder, model)
    if found == "hf":
        stored = open_hf(folder, False, unfinished)
    else:
        stored = open_dist(folder, model) if found == "torch_dist" else open_classic(folder, model, extend)
    for path, digest in read_sums(folder).items():
        (stored.checksums if is_weights(path) else stored.beside)[path] = digest
    return stored
