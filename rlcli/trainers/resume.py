"""Going on with a run: everything it needs is in the checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.checkpoint.find import Checkpoint, resolve
from rlcli.config.load import Loaded, from_dict, get
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.errors import UserError
from rlcli.models.spec import ModelSpec
from rlcli.runs.folder import RunFolder, record_finished, require_free
from rlcli.trainers.launch import anchored, check_dapo, environment_of, open_both, run_dapo
from rlcli.trainers.launch_dpo import check_dpo, open_all, reference_identity, run_dpo
from rlcli.trainers.saving import MODEL, model_identity, require_same, require_same_model

# Settings that the saved state was made under: another value would silently mean another run.
FIXED = (
    "model",
    "data.train",
    "data.max_prompt_tokens",
    "data.template",
    "data.enable_thinking",
    "data.shuffle",
    "rollout.samples_per_prompt",
    "train.seed",
    "train.dtype",
    "data.max_tokens",
    "data.truncation",
    "data.train_on",
    "train.batch_pairs",
)
DATA_REMEDY = "give the same rows as data.train=..., with the chat template of then, or add --allow-data-change to go on with others, from their beginning"
MOVABLE = ("model", "data.train")  # of those, what may move to another place as long as the content is the same


def resume(path: Path, overrides: list[str], allow_data_change: bool = False) -> Path:
    """Resume from a run's folder, its checkpoints folder, or one checkpoint; returns the run's folder."""
    require_free(path)  # a run that goes on prunes what is being looked at
    checkpoint = resolve(path, lambda text: print(text, file=sys.stderr))
    manifest = checkpoint.manifest
    if not manifest.optimizer:
        raise UserError(f"{checkpoint.path}: was saved with checkpoint.save_optimizer=false: it holds weights only, which a new run can start from after `msrl ckpt convert`")
    loaded = from_dict(manifest.kind, manifest.config, overrides)
    loaded.config = anchored(loaded.config)
    refuse_unsafe(from_dict(manifest.kind, manifest.config), loaded, allow_data_change)
    folder = run_folder_of(checkpoint)
    exported = folder is None or (folder / "final").is_dir()  # else it was ended while it wrote the model
    if manifest.step >= loaded.config.train.steps > 0 and exported:
        return already_finished(checkpoint, folder, f"{path} train.steps=N")
    from rlcli.checkpoint.trusted import refuse_code  # brings in torch

    refuse_code(checkpoint.path / MODEL)
    return {"dapo": resume_dapo, "dpo": resume_dpo}[manifest.kind](loaded, checkpoint, folder, allow_data_change)


def run_folder_of(checkpoint: Checkpoint) -> Path | None:
    """The run that a checkpoint lies in; none where it was copied elsewhere on its own."""
    folder = checkpoint.path.parent.parent
    return folder if (folder / "run.json").is_file() else None


def already_finished(checkpoint: Checkpoint, folder: Path | None, more: str) -> Path:
    """Say that nothing is left to do, and how to go on all the same; the run's folder, or the checkpoint where it lies in none."""
    if folder is not None:
        record_finished(folder, checkpoint.step, checkpoint.manifest.sequence)
    where = folder or checkpoint.path
    print(f"{where}: finished, all {checkpoint.step} steps are done; to go on, give more: msrl resume --ckpt {more}")
    return where


def refuse_unsafe(saved: Loaded, loaded: Loaded, allow_data_change: bool) -> None:
    """Raise UserError for overrides that would make the saved state mean something else."""
    for key in FIXED:
        section, _, name = key.partition(".")
        if name and not hasattr(getattr(loaded.config, section, None), name):
            continue  # of the other kind of recipe
        old, new = get(saved.config, key), get(loaded.config, key)
        if old != new and key not in MOVABLE and not (allow_data_change and key.startswith("data.")):
            was, now = (json.dumps(value) if value is None or isinstance(value, bool) else value for value in (old, new))  # as a recipe writes it
            raise UserError(f"{key}={now} cannot be changed when resuming (the checkpoint was made with {was}): start a new run from the trained weights instead")


def require_model(config: DapoRecipe | DpoRecipe, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    require_same_model(config.model, checkpoint.manifest.model, model_identity(spec))


def require_data(config: DapoRecipe | DpoRecipe, fingerprint: str, checkpoint: Checkpoint) -> None:
    require_same(f"the training data {config.data.train}", checkpoint.manifest.data["fingerprint"], fingerprint, DATA_REMEDY)


@contextmanager
def reopened(loaded: Loaded, spec: ModelSpec, checkpoint: Checkpoint, folder: Path | None) -> Iterator[RunFolder]:
    """The run's own folder, rewound to the checkpoint's step; a new one for a checkpoint that lies outside any run."""
    environment = environment_of(loaded.config, spec, resumed_from=str(checkpoint.path))
    if folder is None:
        run = RunFolder.create(loaded.config, loaded.kind, f"resumed-{loaded.kind}", environment)
    else:
        run = RunFolder.reopen(folder, loaded.config, checkpoint.step, environment, sequence=checkpoint.manifest.sequence)
    with run:
        run.console.info(f"resuming after step {checkpoint.step} from {checkpoint.path}")
        yield run


def resume_dapo(loaded: Loaded, checkpoint: Checkpoint, folder: Path | None, allow_data_change: bool) -> Path:
    config = loaded.dapo
    spec = check_dapo(config)
    require_model(config, spec, checkpoint)
    train, held_out = open_both(config)
    if not allow_data_change:
        require_data(config, train.fingerprint, checkpoint)
    with reopened(loaded, spec, checkpoint, folder) as run:
        run_dapo(config, spec, run, train, held_out, checkpoint)
    return run.path


def resume_dpo(loaded: Loaded, checkpoint: Checkpoint, folder: Path | None, allow_data_change: bool) -> Path:
    from rlcli.trainers.dpo import total_steps

    config = loaded.dpo
    spec = check_dpo(config)
    require_model(config, spec, checkpoint)
    train, held_out = open_all(config)
    if not allow_data_change:
        require_data(config, train.fingerprint, checkpoint)
    if checkpoint.step >= total_steps(config, len(train)) and (folder is None or (folder / "final").is_dir()):
        return already_finished(checkpoint, folder, f"{folder or checkpoint.path} train.epochs=N")
    if saved := checkpoint.manifest.data.get("reference"):
        what = f"the reference model in {config.dpo.reference_model or config.model}"
        require_same(what, saved, reference_identity(config), "give its folder as it was, as dpo.reference_model=DIR")
    with reopened(loaded, spec, checkpoint, folder) as run:
        run_dpo(config, spec, run, train, held_out, checkpoint)
    return run.path
