"""The DPO loop (arXiv 2305.18290): pairs, the reference's log-probs, an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcli.algorithms.dpo import DpoLoss, summarise
from rlcli.algorithms.schedule import learning_rate
from rlcli.checkpoint.find import Checkpoint
from rlcli.cluster.processes import ProcessId, tree_memory
from rlcli.config.schema import DpoLossConfig, DpoRecipe
from rlcli.config.steps import pair_steps, trained_pairs
from rlcli.data.cursor import Cursor
from rlcli.engines.base import TrainEngine, UpdateResult
from rlcli.engines.probe import tolerance
from rlcli.errors import RunError
from rlcli.runs.folder import RunFolder
from rlcli.trainers.loop import Loop
from rlcli.trainers.pair_rows import Pairs
from rlcli.trainers.reference import PART_PAIRS, Scores
from rlcli.trainers.saving import Saver, State
from rlcli.trainers.stopping import Stopper
from rlcli.types import TrainRow

EVAL_PAIRS = PART_PAIRS  # held-out pairs computed at once: packed as their reference was, so that equal weights give equal log-probs

Reference = Callable[[Sequence[int], Sequence[TrainRow]], Scores]


@dataclass
class DpoParts:
    """The running parts of one DPO run.

    reference, held_out_reference: give log-probs of pairs by number; none where no loss needs them. own_reference: the reference is the
    model that training starts from. reference_weights: a digest of the reference's weights.
    """

    run: RunFolder
    trainer: TrainEngine
    saver: Saver
    stopper: Stopper
    pairs: Pairs
    held_out: Pairs | None
    reference: Reference | None
    held_out_reference: Reference | None
    own_reference: bool
    model: dict[str, str]
    reference_weights: str


def make_loss(config: DpoLossConfig) -> DpoLoss:
    return DpoLoss(
        losses=tuple(config.losses),
        weights=tuple(config.weights),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        sft_coef=config.sft_coef,
        margin=config.margin,
        length_normalise=config.length_normalise,
        ld_alpha=config.ld_alpha,
        divergence=config.divergence,
        alpha=config.alpha,
    )


def total_steps(config: DpoRecipe, pairs: int) -> int:
    """Updates of a run: `train.steps`, or as many as `train.epochs` passes take, the last one smaller where they do not divide."""
    return pair_steps(config, pairs)


class DpoTrainer(Loop):
    """Runs the steps of one recipe; a step is an update."""

    kind = "dpo"

    def __init__(self, config: DpoRecipe, parts: DpoParts) -> None:
        super().__init__(config, parts, total_steps(config, len(parts.pairs)))
        self.config, self.parts = config, parts
        self.loss = make_loss(config.dpo)
        self.cursor = Cursor(len(parts.pairs), config.train.seed, config.data.shuffle)

    def train(self) -> None:
        """All steps that are left. Raises StoppedEarly after saving what resumes."""
        config = self.config
        if config.eval.before and self.step == 0:
            self.evaluate("before")
        self.clock.read()
        while self.step < self.steps:
            with self.clock.stage("update"):
                numbers, result = self.update()
            self.step += 1
            self.record(numbers, result)
            if self.eval_due:
                self.evaluate(f"after step {self.step}")
            self.save_if_due()
            self.stop_if_asked()
        if config.eval.after:
            self.evaluate("after")
        self.save_last()

    # ---------------------------------------------------------------- one step

    def update(self) -> tuple[list[int], UpdateResult]:
        """One optimizer update on the next pairs."""
        numbers = self.cursor.take(self.batch_size())
        what = f"step {self.step + 1}, update"
        rows = self.with_reference(self.parts.pairs.rows(numbers), numbers, self.parts.reference)
        loss = replace(self.loss, pairs=len(rows), reference_is_current=self.is_reference)
        self.parts.trainer.what = what
        if loss.needs_gather:
            rows = loss.gathered(rows, self.parts.trainer.logprobs(rows)[0])
        result = self.parts.trainer.update(rows, loss, learning_rate(self.step, self.config.optim, self.steps))
        self.check_finite(result, numbers)
        if not result.skipped:
            self.check_reference(summarise(result.metrics))
        return numbers, result

    @property
    def is_reference(self) -> bool:
        """Whether the policy still has the reference's own weights."""
        return self.step == 0 and self.parts.own_reference

    def batch_size(self) -> int:
        """`batch_pairs`, less in the last step of a run that is measured in epochs."""
        size = self.config.train.batch_pairs
        if self.config.train.steps:
            return size
        return max(1, min(size, trained_pairs(self.config, len(self.parts.pairs)) - self.cursor.taken))

    @staticmethod
    def with_reference(rows: list[TrainRow], numbers: Sequence[int], reference: Reference | None) -> list[TrainRow]:
        if reference is None:
            return rows
        scores = reference(numbers, rows)
        return [replace(row, fields={**row.fields, "ref_logprobs": pair}) for row, pair in zip(rows, scores, strict=True)]

    def check_reference(self, measured: dict[str, float]) -> None:
        """Before the first update policy and reference are the same weights: what was given for the reference must be near to the policy's log-probs."""
        gap = measured.get("reference_gap", 0.0)
        limit = tolerance(0.0, self.config.train.dtype)
        if not gap <= limit:  # a gap that is no number is none either
            raise RunError(
                f"{self.parts.trainer.what}: the reference's log-probs differ from the model's own by {gap:.3g} nats a token before any update "
                f"(limit {limit:g}): delete the folders reference-* in those of the prepared data, and start again"
            )

    def check_finite(self, result: UpdateResult, numbers: list[int]) -> None:
        """Count updates that were left out because something was not finite; stop where the settings say so."""
        if not result.skipped:
            self.skipped_in_row = 0
            return
        places = ", ".join(str(self.parts.pairs.numbers[number]) for number in numbers)
        self.count_skipped(f"step {self.step + 1}: loss or gradient is not finite (gradient norm {result.grad_norm}); rows of the data set: {places}")

    # ---------------------------------------------------------------- beside the steps

    def evaluate(self, when: str) -> dict[str, float]:
        """Loss, accuracy and margins on held-out pairs; nothing where there are none."""
        held_out = self.parts.held_out
        if held_out is None:
            return {}
        self.parts.trainer.what = f"evaluation {when}"
        limit = min(len(held_out), self.config.eval.max_pairs or len(held_out))
        rows: list[TrainRow] = []
        logprobs: Scores = []
        for start in range(0, limit, EVAL_PAIRS):
            numbers = range(start, min(start + EVAL_PAIRS, limit))
            some = self.with_reference(held_out.rows(numbers), numbers, self.parts.held_out_reference)
            logprobs += self.parts.trainer.logprobs(some)[0]
            rows += some
        measured = replace(self.loss, reference_is_current=self.is_reference).measure(rows, logprobs)
        if math.isfinite(measured["loss"]):
            self.check_reference(measured)
        measured["truncated_pairs"] = held_out.share_cut(range(limit))
        self.run.log_eval(self.step, measured, when)
        self.newest |= {f"eval/{name}": value for name, value in measured.items()}
        return measured

    def record(self, numbers: list[int], result: UpdateResult) -> None:
        seconds = self.clock.read()
        metrics = {f"update/{name}": value for name, value in summarise(result.metrics).items()}
        metrics |= {
            "update/truncated_pairs": self.parts.pairs.share_cut(numbers),
            "update/grad_norm": result.grad_norm,
            "update/lr": result.lr,
            "update/skipped": float(result.skipped),
            "update/skipped_in_all": float(self.skipped_in_all),
            "update/micro_batches": float(result.micro_batches),
            "update/computed_tokens": float(result.tokens),
            "rate/update_tokens_per_s": result.tokens / max(seconds["seconds/update"], 1e-9),
            "rate/pairs_per_s": len(numbers) / max(seconds["seconds/step"], 1e-9),
            "memory/all_gib": tree_memory(ProcessId.own()) / 2**30,
            **seconds,
        }
        self.run.log_step(self.step, metrics)
        self.newest = dict(metrics)  # an evaluation counts for the checkpoint of its own step alone

    @property
    def place(self) -> Cursor:
        return self.cursor

    @property
    def data_state(self) -> dict[str, Any]:
        return {"fingerprint": self.parts.pairs.fingerprint, "reference": self.parts.reference_weights}

    def state(self) -> State:
        return {"loop": (self.loop_state, None)}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        self.restore_loop(checkpoint)
        self.cursor = self.restored_cursor(checkpoint)
