"""From a checked configuration to a finished run: what `msrl train dpo` does."""

from __future__ import annotations

from pathlib import Path

from rlcli.checkpoint.find import Checkpoint
from rlcli.config.load import Loaded
from rlcli.config.plan import require
from rlcli.config.schema import DpoRecipe
from rlcli.data.prepare import open_or_prepare
from rlcli.data.store import PairSet
from rlcli.errors import UserError
from rlcli.models.registry import read_model
from rlcli.models.spec import ModelSpec
from rlcli.platforms.base import pick
from rlcli.runs.folder import RunFolder
from rlcli.trainers.launch import CACHE, anchored, attended, new_run, precheck, show_plan, sizes
from rlcli.trainers.pair_rows import Pairs, refuse_overlap
from rlcli.trainers.saving import model_identity

# What brings in torch and Ray is imported within functions, so that a mistake in the settings is told at once.


def open_pairs(config: DpoRecipe, source: str) -> Pairs:
    """The usable pairs that `data.train` or `data.eval` names, prepared on the way where they are plain rows."""
    opened = open_or_prepare(source, "pairs", config.model, 0, config.data.template, None, Path(config.run.dir) / CACHE)
    assert isinstance(opened, PairSet)
    return Pairs.of(opened, config.data)


def check_dpo(config: DpoRecipe) -> ModelSpec:
    """Everything that can be found wrong before anything starts."""
    spec = read_model(config.model)
    if config.dpo.reference_model:
        reference = read_model(config.dpo.reference_model)
        if model_identity(reference)["tokenizer"] != model_identity(spec)["tokenizer"]:
            raise UserError(f"dpo.reference_model={config.dpo.reference_model}: its tokenizer is not that of model={config.model}, so its log-probs say nothing about these tokens")
    platform = pick(config.cluster.platform)
    require(config, sizes(spec), platform.name, None if platform.name == "cpu" else platform.device_count())
    needs_reference(config)  # refuses settings that do not work together
    return spec


def train_dpo(loaded: Loaded, dry_run: bool = False) -> Path | None:
    """Run a recipe to its end; returns the run's folder, or None after a dry run."""
    config = anchored(loaded.dpo)
    spec = check_dpo(config)
    precheck(config)
    train, held_out = open_all(config)
    if dry_run:
        show_plan(config, spec, len(train))
        return None
    with new_run(loaded, config, spec) as run:
        run_dpo(config, spec, run, train, held_out)
    return run.path


def open_all(config: DpoRecipe) -> tuple[Pairs, Pairs | None]:
    train = open_pairs(config, config.data.train)
    held_out = open_pairs(config, config.data.eval) if config.data.eval else None
    if held_out is not None:
        refuse_overlap(train, held_out)
    return train, held_out


def tell_pairs(run: RunFolder, name: str, pairs: Pairs | None) -> None:
    if pairs is None:
        return
    cut = f", {len(pairs.cut)} of them cut to the length limits" if pairs.cut else ""
    left = "".join(f"; {count} left out: {reason.replace('_', ' ')}" for reason, count in sorted(pairs.left_out.items()))
    run.console.info(f"{len(pairs)} {name} pairs{cut}{left}")


def run_dpo(config: DpoRecipe, spec: ModelSpec, run: RunFolder, train: Pairs, held_out: Pairs | None, checkpoint: Checkpoint | None = None) -> None:
    """Start the ranks, get the reference's log-probs, train from the beginning or from a checkpoint, export the model."""
    from rlcli.trainers.dpo import DpoTrainer, total_steps
    from rlcli.trainers.parts_dpo import dpo_parts

    run.set_total(total_steps(config, len(train)))
    with attended(config, run) as stopper:
        tell_pairs(run, "training", train)
        tell_pairs(run, "held-out", held_out)
        with dpo_parts(config, spec, run, train, held_out, stopper) as parts:
            DpoTrainer(config, parts).complete(checkpoint)


def needs_reference(config: DpoRecipe) -> bool:
    """Whether a loss compares with a reference. Raises UserError for settings of the loss that do not work together."""
    from rlcli.trainers.dpo import make_loss

    return make_loss(config.dpo).needs_reference


def own_reference(config: DpoRecipe) -> bool:
    """Whether the reference is the very model that training starts from."""
    return config.dpo.reference_model is None or Path(config.dpo.reference_model).resolve() == Path(config.model).resolve()


def reference_identity(config: DpoRecipe) -> str:
    """A digest of the reference's weights; "" where no loss needs a reference."""
    from rlcli.trainers.reference import weights_digest

    return weights_digest(Path(config.dpo.reference_model or config.model)) if needs_reference(config) else ""
