"""Forward and backward passes over micro-batches through Megatron's schedules, with or without pipeline stages.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlcli.algorithms.base import Loss, Tokens
from rlcli.data.pack import MicroBatch
from rlcli.engines.logprobs import head_logprobs
from rlcli.engines.model import PackedGPT
from rlcli.engines.packed import Packed, to_tensors
from rlcli.types import FloatArray

Tensor = torch.Tensor


@dataclass(slots=True)
class Measured:
    """What the micro-batches of this rank gave; empty where this rank holds no head."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0

    def add(self, loss: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        self.loss += float(loss)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))


class Passes:
    """Runs micro-batches through `wrapped`, Megatron's wrapper of `model`."""

    def __init__(self, wrapped: Any, model: PackedGPT, vocabulary: int, temperature: float, chunk: int) -> None:
        self.wrapped, self.model, self.temperature, self.chunk = wrapped, model, temperature, chunk
        self.group = parallel_state.get_tensor_model_parallel_group()
        rows = model.vocab_size // self.group.size()
        self.first = rows * self.group.rank()
        self.rows = max(0, min(vocabulary - self.first, rows))  # the rest of this rank's rows is padding

    def logprobs(self, batches: Sequence[MicroBatch]) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of each micro-batch's response tokens, [N] float32; empty lists where this rank holds no head."""

        def keep(packed: Packed, hidden: Tensor) -> tuple[FloatArray, FloatArray]:
            logprobs_N, entropy_N = self.head(packed, hidden, entropy_grad=False)
            return logprobs_N.numpy(force=True), entropy_N.numpy(force=True)

        with torch.no_grad():
            out = self.run(batches, keep, forward_only=True)
        return [values[0] for values in out], [values[1] for values in out]

    def backward(self, batches: Sequence[MicroBatch], loss: Loss) -> Measured:
        """Add the gradient of the summed loss to the gradient buffers."""
        measured = Measured()

        def measure(packed: Packed, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            logprobs_N, entropy_N = self.head(packed, hidden, loss.needs_entropy)
            out = loss(Tokens(logprobs_N, entropy_N, packed.sample_N, packed.row_S, packed.fields))
            measured.add(out.loss.detach(), out.sums, out.maxima)
            return out.loss, torch.zeros((), dtype=torch.int), None

        self.run(batches, measure, forward_only=False)
        return measured

    def head(self, packed: Packed, hidden: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each response token, from the hidden states that predict them."""
        return head_logprobs(
            hidden[:, 0].index_select(0, packed.source_N),
            self.model.head_weight,
            packed.targets_N,
            temperature=self.temperature,
            chunk=self.chunk,
            entropy_grad=entropy_grad,
            first=self.first,
            rows=self.rows,
            group=self.group,
        )

    def run(self, batches: Sequence[MicroBatch], last: Callable[[Packed, Tensor], Any], forward_only: bool) -> list[Any]:
        """Through Megatron's schedule; `last` turns the last stage's hidden states into what a loss function returns there."""
        if not batches:
            return []

        def step(iterator: Iterator[Packed], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            packed = next(iterator)
            return model(packed), lambda hidden, **unused: last(packed, hidden)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=(to_tensors(batch) for batch in batches),
            model=self.wrapped,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
