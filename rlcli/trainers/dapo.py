"""The DAPO loop (arXiv 2503.14476): sample until enough groups are informative, update on them, hand the weights back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from rlcli.algorithms.dapo import DapoLoss, summarise
from rlcli.algorithms.schedule import learning_rate
from rlcli.config.schema import DapoRecipe
from rlcli.engines.base import UpdateResult
from rlcli.errors import RunError, StoppedEarly
from rlcli.trainers.batch import group_metrics, mini_batches, plain_rows, training_rows, updates_per_step
from rlcli.trainers.clock import Clock
from rlcli.trainers.evaluate import evaluate
from rlcli.trainers.parts import DapoParts
from rlcli.trainers.sampler import Collected
from rlcli.types import FloatArray, Group


class DapoTrainer:
    """Runs the steps of one recipe over parts that are up. `step` counts finished steps, `version` published weights."""

    def __init__(self, config: DapoRecipe, parts: DapoParts) -> None:
        self.config, self.parts, self.run = config, parts, parts.run
        self.clock = Clock()
        self.step = 0
        self.version = 0
        self.skipped_in_row = 0
        self.skipped_in_all = 0

    def train(self) -> dict[str, float]:
        """All steps that are left; returns the last evaluation. Raises StoppedEarly after saving what resumes."""
        config, parts = self.config, self.parts
        self.sync()
        measured = self.evaluate("before") if config.eval.before and self.step == 0 else {}
        self.clock.read()
        while self.step < config.train.steps:
            parts.rollout.what = f"step {self.step + 1}, rollout"
            with self.clock.stage("rollout"):
                collected = parts.sampler.collect(self.step + 1, self.version)
            with self.clock.stage("update"):
                results = self.update(collected.groups)
            with self.clock.stage("sync"):
                self.sync()
            self.step += 1
            self.record(collected, results)
            if config.eval.every and self.step % config.eval.every == 0 and self.step < config.train.steps:
                measured = self.evaluate(f"after step {self.step}")
            self.save_if_due()
            self.stop_if_asked()
        if config.eval.after:
            measured = self.evaluate("after")
        return measured

    # ---------------------------------------------------------------- one step

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
        self.skipped_in_row += 1
        self.skipped_in_all += 1
        where = self.run.save_fault(self.step + 1, groups)
        why = f"step {self.step + 1}: loss or gradient is not finite (gradient norm {result.grad_norm}); the batch is kept in {where}"
        self.run.console.warn(f"{why}; the update was skipped")
        limit = self.config.train.max_nonfinite
        if self.config.train.on_nonfinite == "stop" or self.skipped_in_row >= limit:
            self.save()
            raise RunError(f"{why}. {self.skipped_in_row} in a row, train.max_nonfinite={limit}; the run can be resumed with `msrl resume --ckpt {self.run.path}`")

    def sync(self) -> None:
        """Publish the weights, let every rollout engine take them, and ask both engines for the same log-probs."""
        self.version += 1
        self.parts.sync(self.version, f"step {self.step + 1}, weight sync")

    # ---------------------------------------------------------------- beside the steps

    def evaluate(self, when: str) -> dict[str, float]:
        """Measure on held-out prompts; nothing where there are none."""
        if not self.parts.held_out:
            return {}
        measured, groups = evaluate(self.parts.judge, self.parts.held_out, self.config.eval, self.config.rollout, self.parts.eval_seed)
        self.run.log_eval(self.step, measured, when)
        self.run.log_samples(self.step, groups[:16], kind="eval")
        return measured

    def record(self, collected: Collected, results: Sequence[UpdateResult]) -> None:
        """Everything a user may ask of this step: metrics, samples, a line on the console."""
        seconds = self.clock.read()
        metrics = {**step_metrics(collected, results, self.config), **self.parts.judge.read_tally(), **seconds, **self.parts.measures()}
        metrics["update/skipped_in_all"] = float(self.skipped_in_all)
        metrics |= rates(metrics, collected, results, seconds)
        self.run.log_step(self.step, metrics)
        self.run.log_samples(self.step, collected.groups)

    def save_if_due(self) -> None:
        every = self.config.checkpoint.every
        if every and self.step % every == 0 and self.step < self.config.train.steps:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of everything a resumed run needs."""
        with self.clock.stage("save"):
            self.parts.save(self.step, self.state())

    def stop_if_asked(self) -> None:
        reason = self.parts.stopper.reason
        if reason is not None and self.step < self.config.train.steps:
            self.save()
            self.parts.finish_saving()
            raise StoppedEarly(f"stopped after step {self.step} of {self.config.train.steps} ({reason}); go on with: msrl resume --ckpt {self.run.path}")

    def state(self) -> dict[str, object]:
        """JSON-able state of the loop itself; the sampler's carried groups go beside it."""
        return {
            "step": self.step,
            "skipped_in_row": self.skipped_in_row,
            "skipped_in_all": self.skipped_in_all,
            "version": self.version,
        }

    def restore(self, state: dict[str, object]) -> None:
        self.step = int(str(state["step"]))
        # The next sync publishes the version that the interrupted run had sampled the next step with.
        self.version = int(str(state["version"])) - 1
        self.skipped_in_row = int(str(state["skipped_in_row"]))
        self.skipped_in_all = int(str(state["skipped_in_all"]))


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
    if results:
        metrics["update/grad_norm"] = float(np.mean([result.grad_norm for result in results]))
        metrics["update/lr"] = results[-1].lr
    metrics["update/updates"] = float(sum(not result.skipped for result in results))
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

