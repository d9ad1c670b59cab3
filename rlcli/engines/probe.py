"""After every weight sync: do both engines give the same log-probs for a few fixed sequences?

A sync can fail silently: weights of an older version, a head that kept its packed copy, another temperature. Training would go on
with a wrong importance ratio, so the run stops here and says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcli.errors import RunError
from rlcli.types import FloatArray

TOLERANCE = {"float32": 0.02}  # nats; mean |difference|
OTHER_TOLERANCE = 0.25  # bfloat16 and float16: two engines round differently, by some 0.03 on average
SHOWN = 4  # sequences named in the message


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two engines' log-probs of one sequence lie apart, in nats."""

    mean: float
    largest: float
    bias: float  # mean of rollout minus trainer, with its sign
    tokens: int


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """`mean` and `largest` are over all tokens of all sequences; `largest` and the gaps are for the metrics and the message."""

    mean: float
    largest: float
    gaps: tuple[Gap, ...]


def tolerance(setting: float, dtype: str) -> float:
    """The bound of the mean |difference|: `rollout.probe_tolerance`, or by dtype where that is 0."""
    return setting if setting > 0 else TOLERANCE.get(dtype, OTHER_TOLERANCE)


def compare(rollout: Sequence[FloatArray], trainer: Sequence[FloatArray]) -> ProbeReport:
    """The gaps between both engines' log-probs of the same sequences, each [T_i] on either side."""
    differences = [np.asarray(ours, np.float64) - np.asarray(theirs, np.float64) for ours, theirs in zip(rollout, trainer, strict=True)]
    gaps = tuple(Gap(float(np.abs(d).mean()), float(np.abs(d).max()), float(d.mean()), len(d)) for d in differences if len(d))
    every = np.concatenate(differences) if differences else np.zeros(0)
    if not len(every):
        return ProbeReport(0.0, 0.0, ())
    return ProbeReport(float(np.abs(every).mean()), float(np.abs(every).max()), gaps)


def check(
    rollout: Sequence[FloatArray],
    trainer: Sequence[FloatArray],
    limit: float,
    *,
    engine: str,
    version: int,
    before: Sequence[FloatArray] | None = None,
    tied_head: bool = False,
    temperature: float = 1.0,
) -> ProbeReport:
    """Compare, and raise RunError where the mean |difference| passes `limit` or is not a number.

    Args:
        rollout, trainer: log-probs of the same sequences by the rollout engine and by the trainer.
        engine: name of the rollout engine, for the message.
        before: the rollout engine's log-probs of them before this sync, where known: tells a sync that never arrived.
        tied_head, temperature: of the model and the run, to say what looks wrong.
    """
    report = compare(rollout, trainer)
    if report.mean <= limit:
        return report
    worst = sorted(range(len(report.gaps)), key=lambda i: -report.gaps[i].mean)[:SHOWN]
    lines = [f"  sequence {i}: mean {g.mean:.4f}, largest {g.largest:.4f}, bias {g.bias:+.4f} over {g.tokens} tokens" for i in worst for g in [report.gaps[i]]]
    raise RunError(
        f"probe after weight sync {version}: {engine} and the trainer disagree by {report.mean:.4f} nats a token (largest {report.largest:.4f}; "
        f"at most {limit:g} is accepted)\n" + "\n".join(lines) + f"\n  {_suspect(rollout, before, tied_head, temperature)}"
    )


def _suspect(rollout: Sequence[FloatArray], before: Sequence[FloatArray] | None, tied_head: bool, temperature: float) -> str:
    """What most likely went wrong."""
    if not all(np.isfinite(values).all() for values in rollout):
        return "the rollout engine's log-probs are not finite: its weights are damaged, or the update that made them was"
    if before is not None and all(np.array_equal(now, then) for now, then in zip(rollout, before, strict=True)):
        return "its log-probs are those from before the sync: it still runs the old weights (weight version)"
    causes = ["the output head still has its old, packed copy of the tied embedding (tied head)"] if tied_head else []
    causes.append("some weights did not arrive (weight version)")
    if temperature != 1.0:
        causes.append(f"one side does not apply the temperature {temperature:g} (temperature)")
    return "likely causes, in this order: " + "; ".join(causes)
