"""What the training engine asks of a loss. A loss is a sum over tokens or pairs, already divided by the global count.

So its gradient does not depend on how a mini-batch is cut into micro-batches or spread over devices: the engine only adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

Tensor = torch.Tensor


@dataclass(slots=True)
class Tokens:
    """The response tokens of one micro-batch, packed one after the other (N in all, of S samples).

    logprobs_N: log-probability of each response token under the policy, float32, with gradient.
    entropy_N: entropy of the distribution each was drawn from, with gradient, or None where the loss asks for none.
    sample_N: int64, which of the S samples a token belongs to, ascending; samples of a row are neighbours.
    row_S: int64, which row (prompt) of the micro-batch a sample belongs to.
    fields: the rows' own fields, each [N] float32 (advantage, weight, old_logprobs, ...).
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None
    sample_N: Tensor
    row_S: Tensor
    fields: Mapping[str, Tensor]

    def sum_by_sample(self, values_N: Tensor) -> Tensor:
        """Sum of per-token values for each sample, [S]."""
        zeros_S = torch.zeros(len(self.row_S), dtype=values_N.dtype, device=values_N.device)
        return zeros_S.index_add(0, self.sample_N, values_N)


@dataclass(slots=True)
class LossOutput:
    """loss: scalar with gradient. sums: metrics that add up over micro-batches and data parallel ranks. maxima: those of which the largest counts."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A picklable object: its settings are its attributes; it is called once a micro-batch."""

    needs_entropy: bool  # compute the entropy with gradient; without it entropy is only measured

    def __call__(self, tokens: Tokens) -> LossOutput: ...
