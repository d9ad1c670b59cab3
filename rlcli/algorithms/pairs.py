"""What preference losses see of a micro-batch: log-probs and log-ratios of each pair's chosen and rejected answer.

Suffixes: S samples (chosen and rejected in turn), B pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from rlcli.algorithms.base import Tokens
from rlcli.types import FloatArray, TrainRow

Tensor = torch.Tensor

DIVERGENCES = ("reverse_kl", "js", "alpha", "forward_kl")
EXPONENT_MAX = 80.0  # exp stays finite in float32


@dataclass(frozen=True, slots=True)
class Answers:
    """All chosen or all rejected answers, each value [B]. Sums run over the tokens that the loss covers."""

    logps: Tensor  # sum of log-probs under the policy
    ratios: Tensor  # sum of log-probs under the policy minus those under the reference; the plain sums where there is no reference
    lengths: Tensor  # tokens
    plain_logps: Tensor  # like logps, without the weights of LD-DPO


def answers_of(tokens: Tokens, ld_alpha: float) -> tuple[Answers, Answers]:
    """(chosen, rejected) of a micro-batch whose rows are [prompt, chosen, rejected].

    Fields read: `mask` (0: not covered by the loss; absent: all are) and `ref_logprobs` (absent: no reference).
    ld_alpha: weight of the tokens beyond the shorter answer's length (LD-DPO, arXiv 2409.06411, Eq. 9).
    """
    logprobs_N = tokens.logprobs_N
    mask_N = tokens.fields["mask"] > 0 if "mask" in tokens.fields else torch.ones_like(logprobs_N, dtype=torch.bool)
    nothing = torch.zeros((), dtype=logprobs_N.dtype, device=logprobs_N.device)
    logprobs_N = torch.where(mask_N, logprobs_N, nothing)
    ratios_N = logprobs_N
    if "ref_logprobs" in tokens.fields:
        ratios_N = torch.where(mask_N, logprobs_N - tokens.fields["ref_logprobs"], nothing)
    lengths_S = tokens.sum_by_sample(mask_N.to(logprobs_N.dtype))
    plain_S = tokens.sum_by_sample(logprobs_N)
    if ld_alpha == 1.0:
        logps_S, ratios_S = plain_S, tokens.sum_by_sample(ratios_N)
    else:
        weight_N = _beyond_shorter(tokens, mask_N, lengths_S, ld_alpha)
        logps_S, ratios_S = tokens.sum_by_sample(weight_N * logprobs_N), tokens.sum_by_sample(weight_N * ratios_N)
    chosen, rejected = (Answers(logps_S[i::2], ratios_S[i::2], lengths_S[i::2], plain_S[i::2]) for i in (0, 1))
    return chosen, rejected


def _beyond_shorter(tokens: Tokens, mask_N: Tensor, lengths_S: Tensor, ld_alpha: float) -> Tensor:
    """1 for the first tokens of an answer, as many as the shorter one of the pair has, then `ld_alpha`."""
    counted_N = mask_N.to(torch.int64)
    before_S = torch.cumsum(lengths_S.to(torch.int64), 0) - lengths_S.to(torch.int64)
    place_N = torch.cumsum(counted_N, 0) - before_S[tokens.sample_N]  # 1 for an answer's first covered token
    shorter_S = torch.minimum(lengths_S[0::2], lengths_S[1::2]).repeat_interleave(2)
    return torch.where(place_N <= shorter_S[tokens.sample_N], 1.0, ld_alpha).to(lengths_S.dtype)


def divergence_scores(ratios_B: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(policy / reference) of an f-divergence, from log-ratios; the reward is beta times it (f-DPO, arXiv 2309.16240, Table 1).

    reverse_kl: log t. forward_kl: 1 - 1/t. js: log(2t / (1 + t)). alpha: (t^(alpha - 1) - 1) / (alpha - 1), at alpha = 1 reverse_kl.
    All are 0 at t = 1.
    """
    if divergence == "reverse_kl" or (divergence == "alpha" and abs(alpha - 1.0) < 1e-6):
        return ratios_B
    if divergence == "forward_kl":
        return -torch.expm1((-ratios_B).clamp(max=EXPONENT_MAX))
    if divergence == "js":
        return math.log(2.0) + F.logsigmoid(ratios_B)
    if divergence == "alpha":
        return torch.expm1(((alpha - 1.0) * ratios_B).clamp(max=EXPONENT_MAX)) / (alpha - 1.0)
    raise ValueError(f"unknown divergence {divergence!r}; one of {', '.join(DIVERGENCES)}")


def tokens_of(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[FloatArray]]) -> Tokens:
    """Rows with the log-probs that the training engine gave for them, as one batch of Tokens without gradient."""
    responses = [response for row in rows for response in row.responses]
    sample_N = np.repeat(np.arange(len(responses)), [len(response) for response in responses])
    row_S = np.repeat(np.arange(len(rows)), [len(row.responses) for row in rows])
    names = list(rows[0].fields) if rows else []
    fields = {name: _joined([values for row in rows for values in row.fields[name]]) for name in names}
    joined_N = _joined([values for row in logprobs for values in row])
    return Tokens(joined_N, None, torch.from_numpy(sample_N), torch.from_numpy(row_S), fields)


def _joined(parts: Sequence[FloatArray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32, copy=False))
