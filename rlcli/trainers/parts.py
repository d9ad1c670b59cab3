"""Everything a DAPO run consists of, put together once and taken down in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.cluster.launch import LocalCluster
from rlcli.cluster.processes import ProcessId, tree_memory
from rlcli.cluster.supervise import Worker
from rlcli.config.schema import ClusterConfig, DapoRecipe, OptimConfig, ParallelConfig
from rlcli.data.cursor import Cursor
from rlcli.data.store import PromptSet
from rlcli.engines.base import Sampling, TrainEngine, WeightHandle
from rlcli.engines.probe import check, tolerance
from rlcli.engines.rollout_pool import RolloutPool
from rlcli.engines.rollout_setup import BYTES, RolloutSetup, rollout_setup
from rlcli.engines.train import TrainSetup
from rlcli.engines.train_group import TrainGroup
from rlcli.engines.weights import SharedMemoryTransport
from rlcli.errors import StoppedEarly
from rlcli.models.spec import ModelSpec
from rlcli.platforms import allocator
from rlcli.platforms.base import Platform, pick
from rlcli.platforms.threads import allowed_cores, share
from rlcli.rewards.pool import RewardPool
from rlcli.runs.folder import RunFolder
from rlcli.trainers.rollouts import Judge
from rlcli.trainers.sampler import Sampler
from rlcli.trainers.saving import Saver, model_identity, open_store
from rlcli.trainers.stopping import Stopper
from rlcli.types import Group, Prompt, TrainRow

PROBE_TOKENS = 32  # of each probed sequence
# Evaluation draws with seeds of its own, so that looking at a run does not change it.
EVAL_SEED_OFFSET = 1_000_003


@dataclass
class Machine:
    """How the workers of one machine are started: platform, cores, and LD_PRELOAD for the allocator."""

    platform: Platform
    cores: list[int]
    preload: str

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Machine:
        return cls(pick(cluster.platform), allowed_cores(cluster.threads), allocator.find(cluster.preload_allocator).preload())

    def envs(self, role: Any, workers: int, ranks: int = 1) -> list[dict[str, str]]:
        """The environment of each worker of a role; roles take turns, so each gets all cores."""
        return [self.platform.env(role, threads, self.preload) for threads in share(self.cores, workers, ranks)]


def train_setup(model: str, optim: OptimConfig, parallel: ParallelConfig, train: Any, cluster: ClusterConfig, temperature: float, publish_dtype: str | None) -> TrainSetup:
    """What the training ranks are told, from either recipe."""
    return TrainSetup(
        model=model,
        optim=optim,
        parallel=parallel,
        dtype=train.dtype,
        temperature=temperature,
        micro_batch_tokens=train.micro_batch_tokens,
        head_chunk_tokens=train.head_chunk_tokens,
        prefix_sharing=train.prefix_sharing,
        recompute=train.recompute,
        seed=train.seed,
        deterministic=train.deterministic,
        timeout_s=cluster.step_timeout_s,
        platform=cluster.platform,
        publish_dtype=publish_dtype,
    )


def spawn_trainer(
    cluster: LocalCluster, machine: Machine, setup: TrainSetup, config: ClusterConfig, logs: Path, called: str = "train rank"
) -> TrainGroup:
    """Start the processes of all training ranks; `TrainGroup.build` loads the model."""
    count = setup.parallel.devices
    names = [f"{called} {rank}" for rank in range(count)]
    paths = [logs / f"{name.replace(' ', '-')}.log" for name in names]
    workers: list[Worker] = cluster.spawn(names, paths, machine.envs("train", count), cpus=0, timeout_s=config.start_timeout_s)
    return TrainGroup(cluster, workers, setup.parallel, setup, config.step_timeout_s)


def launch_rollout(
    config: DapoRecipe, cluster: LocalCluster, machine: Machine, setup: RolloutSetup, transport: SharedMemoryTransport, logs: Path
) -> RolloutPool:
    """Begin to start the rollout engines; `RolloutPool.ready` waits for them."""
    engines = config.rollout.engines
    return RolloutPool.launch(
        cluster,
        setup,
        machine.envs("rollout", engines, config.rollout.tensor_parallel),
        [logs / f"rollout-engine-{number}.log" for number in range(engines)],
        transport,
        config.cluster.step_timeout_s,
        config.train.deterministic,
    )


@dataclass
class Syncer:
    """Carries the weights from the training ranks to the rollout engines, and asks both for the same log-probs afterwards."""

    trainer: TrainEngine
    rollout: RolloutPool
    transport: SharedMemoryTransport
    sequences: list[tuple[Any, Any]]
    limit: float
    tied_head: bool
    temperature: float
    gap: float = 0.0  # mean |difference| of the last probe, nats
    _before: list[Any] | None = None

    def __call__(self, version: int, what: str) -> None:
        self.trainer.what = self.rollout.what = what
        files = self.trainer.publish(version, self.transport.folder)
        self.rollout.update_weights(WeightHandle(version, tuple(files), self.tied_head))
        if self.sequences:
            self.probe(version, what)

    def probe(self, version: int, what: str) -> None:
        self.trainer.what = self.rollout.what = f"{what}, probe"
        theirs = self.rollout.score_each(self.sequences, self.temperature)
        rows = [TrainRow(first, [second]) for first, second in self.sequences]
        ours = [values[0] for values in self.trainer.logprobs(rows)[0]]
        for worker, values in zip(self.rollout.workers, theirs, strict=True):
            report = check(
                values, ours, self.limit, engine=worker.name, version=version, before=self._before, tied_head=self.tied_head, temperature=self.temperature
            )
            self.gap = report.mean
        self._before = theirs[0]


def probe_sequences(prompts: PromptSet, count: int) -> list[tuple[Any, Any]]:
    """The first prompts, each cut in two: given part and scored part."""
    chosen = [prompts.prompt(number).token_ids for number in range(min(count, len(prompts)))]
    cuts = [(ids, min(PROBE_TOKENS, len(ids) // 2)) for ids in chosen if len(ids) > 1]
    return [(np.asarray(ids[:-tail]), np.asarray(ids[-tail:])) for ids, tail in cuts]


@dataclass
class DapoParts:
    """The running parts of one DAPO run."""

    run: RunFolder
    cluster: LocalCluster
    machine: Machine
    trainer: TrainEngine
    rollout: RolloutPool
    rewards: RewardPool
    judge: Judge
    syncer: Syncer
    stopper: Stopper
    cursor: Cursor
    held_out: Sequence[Prompt]
    eval_seed: int | None
    saver: Saver
    model: dict[str, str]  # identity of the model, for checkpoints
    data: str  # fingerprint of the training data
    sampler: Sampler = field(init=False)

    def measures(self) -> dict[str, float]:
        """Memory of all processes of the run (PSS, bytes shared counted once) and the last probe's gap."""
        return {"memory/all_gib": tree_memory(ProcessId.own()) / 2**30, "sync/probe_gap": self.syncer.gap}


@contextmanager
def dapo_parts(
    config: DapoRecipe, spec: ModelSpec, run: RunFolder, train: PromptSet, held_out: Sequence[Prompt], decode: Any, stopper: Stopper
) -> Iterator[DapoParts]:
    """Start Ray, the training ranks, the rollout engines and the verifiers; end them all in the end, however it comes."""
    machine = Machine.of(config.cluster)
    wait = config.cluster.start_timeout_s
    with ExitStack() as stack:
        rewards = stack.enter_context(RewardPool(config.reward))
        cluster = stack.enter_context(LocalCluster(len(machine.cores), config.cluster.heartbeat_s))
        setup = rollout_setup(spec, config.rollout, config.data.max_prompt_tokens, config.train.dtype, config.train.seed, machine.platform)
        transport = SharedMemoryTransport.create(2 * spec.parameters * BYTES[setup.dtype])
        stack.callback(transport.close)
        cluster.own_folder(transport.folder)
        rollout = launch_rollout(config, cluster, machine, setup, transport, run.logs)
        ranks = train_setup(config.model, config.optim, config.parallel, config.train, config.cluster, config.rollout.temperature, setup.dtype)
        trainer = spawn_trainer(cluster, machine, ranks, config.cluster, run.logs)
        trainer.build(wait)
        rollout.ready(wait)
        judge = Judge(rollout, rewards, decode)
        limit = tolerance(config.rollout.probe_tolerance, setup.dtype)
        sequences = probe_sequences(train, config.rollout.probe_prompts)
        syncer = Syncer(trainer, rollout, transport, sequences, limit, spec.tied, config.rollout.temperature)
        cursor = Cursor(len(train), config.train.seed, config.data.shuffle)
        eval_seed = config.train.seed + EVAL_SEED_OFFSET if config.train.deterministic else None
        store = stack.enter_context(open_store(run.checkpoints, config.checkpoint, run.console.warn))
        saver = Saver(store, trainer, config.checkpoint, run.console.warn)
        parts = DapoParts(
            run, cluster, machine, trainer, rollout, rewards, judge, syncer, stopper, cursor, held_out, eval_seed, saver, model_identity(spec), train.fingerprint
        )
        parts.sampler = make_sampler(config, parts, train)
        yield parts


def make_sampler(config: DapoRecipe, parts: DapoParts, train: PromptSet) -> Sampler:
    """The dynamic sampler over this run's data, engine and verifiers."""
    sampling = training_sampling(config)

    def take(count: int) -> list[Prompt]:
        return [train.prompt(number) for number in parts.cursor.take(count)]

    def generate(prompts: list[Prompt]) -> Iterator[tuple[int, Group]]:
        if config.train.deterministic:  # a step that was cut in two would not be the same: it is finished before a stop
            yield from parts.judge.groups(prompts, sampling)
            return
        yield from parts.judge.groups(prompts, sampling, parts.stopper.asked)
        if parts.stopper.reason is not None:
            raise StoppedEarly(parts.stopper.reason)

    return Sampler(config.sampling, config.train.batch_prompts, config.rollout.samples_per_prompt, take, generate, parts.run.console.warn)


def training_sampling(config: DapoRecipe) -> Sampling:
    """How responses are drawn in training."""
    rollout = config.rollout
    return Sampling(
        samples=rollout.samples_per_prompt,
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        seed=config.train.seed if config.train.deterministic else None,
    )

