"""From a checked configuration to a finished run: what `msrl train dpo` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcli.checkpoint.find import Checkpoint
from rlcli.cluster.launch import LocalCluster
from rlcli.config.architecture import read_architecture
from rlcli.config.load import Loaded
from rlcli.config.plan import require
from rlcli.config.schema import DpoRecipe
from rlcli.data.prepare import open_or_prepare
from rlcli.data.store import PairSet
from rlcli.engines.train_group import TrainGroup
from rlcli.errors import UserError
from rlcli.models.registry import read_model
from rlcli.models.spec import ModelSpec
from rlcli.platforms.base import pick
from rlcli.runs.environment import describe
from rlcli.runs.folder import RunFolder
from rlcli.trainers.dpo import DpoParts, DpoTrainer, Reference, make_loss, total_steps
from rlcli.trainers.launch import CACHE, anchored, new_run, precheck, show_plan
from rlcli.trainers.pair_rows import Pairs, refuse_overlap
from rlcli.trainers.parts import Machine, spawn_trainer, train_setup
from rlcli.trainers.reference import ReferenceCache, Scores, reference_ranks, weights_digest
from rlcli.trainers.saving import Saver, export_final, model_identity, open_store
from rlcli.trainers.stopping import Stopper, saying_what_is_left
from rlcli.types import TrainRow


def open_pairs(config: DpoRecipe, source: str) -> Pairs:
    """The usable pairs that `data.train` or `data.eval` names, prepared on the way where they are plain rows."""
    opened = open_or_prepare(source, "pairs", config.model, 0, config.data.template, None, Path(config.run.dir) / CACHE)
    assert isinstance(opened, PairSet)
    return Pairs.of(opened, config.data)


def check_dpo(config: DpoRecipe) -> ModelSpec:
    """Everything that can be found wrong before anything starts."""
    make_loss(config.dpo)  # refuses settings that do not work together
    spec = read_model(config.model)
    if config.dpo.reference_model:
        reference = read_model(config.dpo.reference_model)
        if model_identity(reference)["tokenizer"] != model_identity(spec)["tokenizer"]:
            raise UserError(f"dpo.reference_model={config.dpo.reference_model}: its tokenizer is not that of model={config.model}, so its log-probs say nothing about these tokens")
    platform = pick(config.cluster.platform)
    require(config, read_architecture(config.model), platform.name, None if platform.name == "cpu" else platform.device_count())
    return spec


def train_dpo(loaded: Loaded, dry_run: bool = False) -> Path | None:
    """Run a recipe to its end; returns the run's folder, or None after a dry run."""
    config = anchored(loaded.dpo)
    spec = check_dpo(config)
    precheck(config)
    train, held_out = open_all(config)
    if dry_run:
        show_plan(loaded, len(train))
        return None
    with new_run(config, "dpo", loaded.recipe_name, describe(model=str(spec.folder), recipe=loaded.recipe_name)) as run:
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
    run.console.info(f"run folder {run.path}")
    tell_pairs(run, "training", train)
    tell_pairs(run, "held-out", held_out)
    run.set_total(total_steps(config, len(train)))
    with saying_what_is_left(run), Stopper(config.run.max_minutes) as stopper, dpo_parts(config, spec, run, train, held_out, stopper) as parts:
        trainer = DpoTrainer(config, parts)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        trainer.train()
        export_final(parts.trainer, run.final)
        run.console.info(f"the trained model is in {run.final}")


@contextmanager
def dpo_parts(config: DpoRecipe, spec: ModelSpec, run: RunFolder, train: Pairs, held_out: Pairs | None, stopper: Stopper) -> Iterator[DpoParts]:
    """Everything a DPO run consists of; all ended in the end."""
    machine = Machine.of(config.cluster)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(len(machine.cores), config.cluster.heartbeat_s))
        references: list[Reference | None] = [None, None]
        sets = [train, held_out]
        own, weights = own_reference(config), reference_identity(config)
        live = config.dpo.reference == "live" and weights != ""
        if live:
            group = stack.enter_context(reference_ranks(cluster, lambda: ranks_of(config, cluster, machine, run, True), config.cluster.start_timeout_s))
            references = [live_reference(group) if pairs is not None else None for pairs in sets]
        caches = reference_caches(config, weights, sets) if weights and not live else []
        if not own and any(cache.missing() for cache in caches):
            with reference_ranks(cluster, lambda: ranks_of(config, cluster, machine, run, True), config.cluster.start_timeout_s) as other:
                fill(caches, other, run, stopper)
        trainer = ranks_of(config, cluster, machine, run, False)
        trainer.build(config.cluster.start_timeout_s)
        if caches:
            fill(caches, trainer, run, stopper)  # the ranks hold the model as it is before training; for another reference nothing is left to do
            references = [cache.scores for cache in caches] + [None] * (2 - len(caches))
        store = stack.enter_context(open_store(run.checkpoints, config.checkpoint, run.console.warn))
        saver = Saver(store, trainer, config.checkpoint, run.console.warn)
        yield DpoParts(run, trainer, saver, stopper, train, held_out, references[0], references[1], own, model_identity(spec), weights)


def ranks_of(config: DpoRecipe, cluster: LocalCluster, machine: Machine, run: RunFolder, reference: bool) -> TrainGroup:
    """The processes of the training ranks, for the policy or for the reference."""
    model = (config.dpo.reference_model or config.model) if reference else config.model
    setup = train_setup(model, config.optim, config.parallel, config.train, config.cluster, 1.0, None)
    return spawn_trainer(cluster, machine, setup, config.cluster, run.logs, "reference rank" if reference else "train rank")


def own_reference(config: DpoRecipe) -> bool:
    """Whether the reference is the very model that training starts from."""
    return config.dpo.reference_model is None or Path(config.dpo.reference_model).resolve() == Path(config.model).resolve()


def reference_identity(config: DpoRecipe) -> str:
    """A digest of the reference's weights; "" where no loss needs a reference."""
    return weights_digest(Path(config.dpo.reference_model or config.model)) if make_loss(config.dpo).needs_reference else ""


def reference_caches(config: DpoRecipe, weights: str, sets: Sequence[Pairs | None]) -> list[ReferenceCache]:
    """The caches of training and held-out pairs for the reference with that digest of its weights.

    In a deterministic run layout and packing are part of the arithmetic, so that it never depends on which run filled a cache.
    """
    train = config.train
    arithmetic: list[Any] = [train.dtype]
    if train.deterministic:
        arithmetic += [asdict(config.parallel), train.micro_batch_tokens, train.head_chunk_tokens, train.prefix_sharing]
    return [ReferenceCache(pairs, weights, *arithmetic) for pairs in sets if pairs is not None]


def fill(caches: Sequence[ReferenceCache], group: TrainGroup, run: RunFolder, stopper: Stopper) -> None:
    """Compute what the caches lack, and say where it comes from."""
    group.what = "reference log-probs"
    for cache in caches:
        cache.fill(lambda rows: group.logprobs(rows)[0], run.console.info, stopper.asked)


def live_reference(group: TrainGroup) -> Reference:
    """Reference log-probs from ranks that hold the reference, batch by batch."""

    def scores(numbers: Sequence[int], rows: Sequence[TrainRow]) -> Scores:
        group.what = "reference log-probs"
        return group.logprobs(rows)[0]

    return scores
