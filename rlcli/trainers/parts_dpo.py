"""Everything a DPO run consists of, put together once and taken down in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from rlcli.cluster.launch import LocalCluster
from rlcli.config.schema import DpoRecipe
from rlcli.engines.base import TrainEngine
from rlcli.engines.train_group import TrainGroup
from rlcli.models.spec import ModelSpec
from rlcli.runs.folder import RunFolder
from rlcli.trainers.dpo import DpoParts, Reference
from rlcli.trainers.launch_dpo import own_reference, reference_identity
from rlcli.trainers.pair_rows import Pairs
from rlcli.trainers.parts import Machine, spawn_trainer, train_setup
from rlcli.trainers.reference import ReferenceCache, Scores, reference_ranks
from rlcli.trainers.saving import Saver, model_identity, open_store
from rlcli.trainers.stopping import Stopper
from rlcli.types import TrainRow


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


def reference_caches(config: DpoRecipe, weights: str, sets: Sequence[Pairs | None]) -> list[ReferenceCache]:
    """The caches of training and held-out pairs for the reference with that digest of its weights.

    In a deterministic run layout and packing are part of the arithmetic, so that it never depends on which run filled a cache.
    """
    train = config.train
    arithmetic: list[Any] = [train.dtype]
    if train.deterministic:
        arithmetic += [asdict(config.parallel), train.micro_batch_tokens, train.head_chunk_tokens, train.prefix_sharing]
    return [ReferenceCache(pairs, weights, *arithmetic) for pairs in sets if pairs is not None]


def fill(caches: Sequence[ReferenceCache], group: TrainEngine, run: RunFolder, stopper: Stopper) -> None:
    """Compute what the caches lack, and say where it comes from."""
    group.what = "reference log-probs"
    for cache in caches:
        cache.fill(lambda rows: group.logprobs(rows)[0], run.console.info, stopper.asked)


def live_reference(group: TrainEngine) -> Reference:
    """Reference log-probs from ranks that hold the reference, batch by batch."""

    def scores(numbers: Sequence[int], rows: Sequence[TrainRow]) -> Scores:
        group.what = "reference log-probs"
        return group.logprobs(rows)[0]

    return scores
