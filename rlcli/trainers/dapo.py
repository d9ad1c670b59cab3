"""The DAPO loop (arXiv 2503.14476): sample until enough groups are informative, update on them, hand the weights back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlcli.algorithms.dapo import DapoLoss, summarise
from rlcli.algorithms.schedule import learning_rate
from rlcli.checkpoint.find import Checkpoint
from rlcli.checkpoint.state import read_state
from rlcli.config.schema import DapoRecipe
from rlcli.data.cursor import Cursor
from rlcli.engines.base import UpdateResult
from rlcli.errors import StoppedEarly
from rlcli.trainers.batch import group_metrics, mini_batches, plain_rows, training_rows, updates_per_step
from rlcli.trainers.evaluate import evaluate
from rlcli.trainers.loop import Loop
from rlcli.trainers.parts import DapoParts
from rlcli.trainers.sampler import Collected
from rlcli.trainers.saving import State
from rlcli.types import FloatArray, Group


class DapoTrainer(Loop):
    """Runs the steps of one recipe over parts that are up. `version` counts published weights."""

    kind = "dapo"

    def __init__(self, config: DapoRecipe, parts: DapoParts) -> None:
        super().__init__(config, parts, config.train.steps)
        self.config, self.parts = config, parts
        self.version = 0

    def train(self) -> None:
        """All steps that are left. Raises StoppedEarly after saving what resumes."""
        config, parts = self.config, self.parts
        if self.step >= config.train.steps:
            return  # a run that was ended after its last step
        self.sync()
        if config.eval.before and self.step == 0:
            self.evaluate("before")
        self.clock.read()
        self.stop_if_asked()
        while self.step < config.train.steps:
            parts.rollout.what = f"step {self.step + 1}, rollout"
            with self.clock.stage("rollout"):
                collected = self.collect()
            with self.clock.stage("update"):
                results = self.update(collected.groups)
            with self.clock.stage("sync"):
                self.sync()
            self.step += 1
            self.record(collected, results)
            if self.eval_due:
                self.evaluate(f"after step {self.step}")
            self.save_if_due()
            self.stop_if_asked()
        if config.eval.after:
            self.evaluate("after")
        self.save_last()

    # ---------------------------------------------------------------- one step

    def collect(self) -> Collected:
        """The groups of the next step. Where sampling is given up by the settings, what was kept is saved first."""
        try:
            return self.parts.sampler.collect(self.step + 1, self.version)
        except StoppedEarly as error:
            self.stop(str(error))
            raise

    def update(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """All optimizer updates of a step, `epochs` times over its groups."""
        config, parts = self.config, self.parts
        lr = learning_rate(self.step, config.optim, config.train.steps)
        old = self.old_logprobs(groups)
        loss = DapoLoss(
            clip_low=config.dapo.clip_low,
            clip_high=config.dapo.clip_high,
            dual_clip=config.dapo.dual_clip,
            entropy_coef=config.dapo.entropy_coef,
            correction=config.dapo.correction,
            correction_max=config.dapo.correction_max,
            old_is_current=old is None,
        )
        results = []
        for _ in range(config.dapo.epochs if groups else 0):
            start = 0
            for batch in mini_batches(groups, config):
                given = None if old is None else old[start : start + len(batch)]
                rows = training_rows(batch, config, given)
                parts.trainer.what = f"step {self.step + 1}, update"
                results.append(parts.trainer.update(rows, loss, lr))
                self.check_finite(results[-1], batch)
                start += len(batch)
        return results

    def old_logprobs(self, groups: Sequence[Group]) -> list[list[FloatArray]] | None:
        """What the ratio compares with: None where the weights of the update are those of the comparison, so that the ratio is 1."""
        kind = self.config.dapo.old_logprobs
        if kind == "rollout":
            return [[sample.logprobs for sample in group.samples] for group in groups]
        if (kind == "auto" and updates_per_step(self.config) == 1) or not groups:
            return None
        self.parts.trainer.what = f"step {self.step + 1}, old log-probs"
        return self.parts.trainer.logprobs(plain_rows(groups))[0]

    def check_finite(self, result: UpdateResult, groups: Sequence[Group]) -> None:
        """Count updates that were left out because something was not finite, keep their batch, and stop where the setting says so."""
        if not result.skipped:
            self.skipped_in_row = 0
            return
        where = self.run.save_fault(self.step + 1, groups)
        self.count_skipped(f"step {self.step + 1}: loss or gradient is not finite (gradient norm {result.grad_norm}); the batch is kept in {where}")

    def sync(self) -> None:
        """Publish the weights, let every rollout engine take them, and ask both engines for the same log-probs."""
        self.version += 1
        self.parts.syncer(self.version, f"step {self.step + 1}, weight sync")

    # ---------------------------------------------------------------- beside the steps

    def evaluate(self, when: str) -> None:
        """Measure on held-out prompts; nothing where there are none."""
        if not self.parts.held_out:
            return
        measured, groups = evaluate(self.parts.judge, self.parts.held_out, self.config.eval, self.config.rollout, self.parts.eval_seed)
        self.run.log_eval(self.step, measured, when)
        self.newest |= {f"eval/{name}": value for name, value in measured.items()}
        self.run.log_samples(self.step, groups[:16], kind="eval")

    def record(self, collected: Collected, results: Sequence[UpdateResult]) -> None:
        """Everything a user may ask of this step: metrics, samples, a line on the console."""
        seconds = self.clock.read()
        metrics = {**step_metrics(collected, results, self.config), **self.parts.judge.read_tally(), **seconds, **self.parts.measures()}
        metrics["update/skipped_in_all"] = float(self.skipped_in_all)
        metrics |= rates(metrics, collected, results, seconds)
        self.run.log_step(self.step, metrics)
        self.newest = dict(metrics)  # an evaluation counts for the checkpoint of its own step alone
        self.run.log_samples(self.step, collected.groups)
        self.warn_unjudged(metrics)

    def warn_unjudged(self, metrics: Mapping[str, float]) -> None:
        """Say where verifiers failed: they were taken for wrong, and a user should know before believing the accuracy."""
        late, broken = (round(metrics.get(f"reward/{reason}", 0.0)) for reason in ("timeout", "crashed"))
        if late or broken:
            last = " ".join(self.parts.rewards.last_crash.split())[:200]
            self.run.console.warn(
                f"step {self.step}: of {metrics['sampled/samples']:.0f} samples, {late} were not judged within reward.timeout_s, and on {broken} a verifier failed"
                + (f" (the last: {last})" if broken and last else "")
            )

    @property
    def place(self) -> Cursor:
        return self.parts.cursor

    @property
    def data_state(self) -> dict[str, Any]:
        return {"fingerprint": self.parts.data}

    @property
    def saved(self) -> bool:
        return super().saved and not self.parts.sampler.unfinished

    def state(self) -> State:
        loop = {**self.loop_state, "version": self.version, "drawn": self.parts.judge.drawn}
        return {"loop": (loop, None), "sampler": self.parts.sampler.state()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        loop = self.restore_loop(checkpoint)
        self.version = loop["version"] - 1  # the first sync publishes the version that the next step was to be sampled with
        self.parts.judge.drawn = loop["drawn"]
        self.parts.sampler.restore(*read_state(checkpoint.path, "sampler"))
        self.parts.cursor = self.restored_cursor(checkpoint)


def step_metrics(collected: Collected, results: Sequence[UpdateResult], config: DapoRecipe) -> dict[str, float]:
    """Metrics of what was sampled, kept and learnt. Over several updates of a step, means; of maxima, the largest."""
    metrics = {f"sampling/{name}": float(value) for name, value in asdict(collected.counts).items()}
    metrics["sampling/acceptance"] = collected.acceptance
    metrics["sampling/partial"] = float(collected.partial)
    metrics |= group_metrics(collected.groups, config)
    per_update = [summarise(result.metrics) for result in results if result.metrics]
    for name in sorted({name for summary in per_update for name in summary}):
        values = [summary[name] for summary in per_update if name in summary]
        metrics[f"update/{name}"] = float(np.max(values) if name.endswith("_max") else np.mean(values))
    norms = [result.grad_norm for result in results if not result.empty]
    if norms:
        metrics["update/grad_norm"] = float(np.mean(norms))
    if results:
        metrics["update/lr"] = results[-1].lr
    metrics["update/updates"] = float(sum(not (result.skipped or result.empty) for result in results))
    metrics["update/empty"] = float(sum(result.empty for result in results))
    metrics["update/skipped"] = float(sum(result.skipped for result in results))
    metrics["update/micro_batches"] = float(sum(result.micro_batches for result in results))
    return metrics


def rates(metrics: dict[str, float], collected: Collected, results: Sequence[UpdateResult], seconds: dict[str, float]) -> dict[str, float]:
    """Tokens a second: response tokens sampled, tokens computed in updates, and response tokens trained on end to end."""
    trained = sum(len(sample.token_ids) for group in collected.groups for sample in group.samples)
    return {
        "rate/rollout_tokens_per_s": metrics["sampled/samples"] * metrics.get("sampled/response_tokens", 0.0) / max(seconds.get("seconds/rollout", 0.0), 1e-9),
        "rate/update_tokens_per_s": sum(result.tokens for result in results) / max(seconds.get("seconds/update", 0.0), 1e-9),
        "rate/trained_tokens_per_s": trained / max(seconds["seconds/step"], 1e-9),
        "rate/samples_per_s": sum(len(group.samples) for group in collected.groups) / max(seconds["seconds/step"], 1e-9),
    }

