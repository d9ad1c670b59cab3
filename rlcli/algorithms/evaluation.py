"""Measures of a model on held-out prompts, from judged groups: avg@k, pass@k, maj@k, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from rlcli.types import Group, Verdict


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right, from `correct` of `samples` (arXiv 2107.03374, Eq. 1)."""
    if not 0 < k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def majority(verdicts: Sequence[Verdict]) -> bool:
    """Whether the most frequent extracted answer is right; samples without an answer have no vote, ties go to the first seen."""
    votes = Counter(verdict.answer.strip() for verdict in verdicts if verdict.answer is not None)
    if not votes:
        return False
    winner = max(votes, key=votes.__getitem__)  # a Counter keeps the order of first sight, and max returns the first of equals
    return next(verdict.correct for verdict in verdicts if verdict.answer is not None and verdict.answer.strip() == winner)


def evaluate(groups: Sequence[Group]) -> dict[str, float]:
    """Measures over judged groups, all with the same number k of samples; means over prompts.

    accuracy and avg@k (the same number), pass@j for j = 1, 2, 4 ... and k, maj@k, reward (before shaping), response_tokens (mean length),
    truncated, no_answer, unjudged (shares of samples: cut at the limit; nothing extracted; verifier timed out or crashed),
    prompts, samples. Empty for no groups. Raises ValueError where groups differ in size or lack verdicts.
    """
    if not groups:
        return {}
    k = len(groups[0].samples)
    if any(len(group.samples) != k or len(group.verdicts) != k for group in groups):
        raise ValueError(f"every group must have {k} samples and as many verdicts")
    samples = [sample for group in groups for sample in group.samples]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    correct = [sum(verdict.correct for verdict in group.verdicts) for group in groups]
    accuracy = _mean([count / k for count in correct])
    tries = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    return {
        "accuracy": accuracy,
        f"avg@{k}": accuracy,
        **{f"pass@{j}": _mean([pass_at_k(k, count, j) for count in correct]) for j in tries},
        f"maj@{k}": _mean([float(majority(group.verdicts)) for group in groups]),
        "reward": _mean([verdict.score for verdict in verdicts]),
        "response_tokens": _mean([len(sample.token_ids) for sample in samples]),
        "truncated": _mean([float(sample.truncated) for sample in samples]),
        "no_answer": _mean([float(verdict.answer is None) for verdict in verdicts]),
        "unjudged": _mean([float(verdict.reason in ("timeout", "crashed")) for verdict in verdicts]),
        "prompts": float(len(groups)),
        "samples": float(len(samples)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
