"""Log-probabilities and entropies of chosen tokens, with the head applied to the tokens that need it, a chunk at a time.

The logits of a chunk are made, used and dropped, and made again in the backward pass, so that [tokens x vocabulary] never
stands whole; only the last chunk waits for the backward pass, which begins with it. Under tensor parallelism every rank holds a
slice of the vocabulary; ranks exchange a few numbers a token.

With z = logits / temperature, lse = log sum exp z and p = exp(z - lse):
    log-prob of token y:  z_y - lse                 d/dz = 1[y] - p
    entropy:              lse - sum p z             d/dz = -p (log p + entropy)

A token's gradient is its upstream gradient times (1[y] - p), with p = e / s for the exponentials e = exp(z - max z) that the forward
pass has made. What is one number a token is left out of [tokens x vocabulary] and put on the narrow side of the matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlcli.engines import grads

Tensor = torch.Tensor

BLOCK_ELEMENTS = 1 << 20  # logits that are worked on at once, so that the passes over them stay in the cache


def head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_grad: bool = False,
    first: int = 0,
    rows: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, [N] float32 each; `chunk` tokens' logits stand at once.

    first: vocabulary number of the weight's first row on this rank; rows: how many of its rows are vocabulary, the rest
    being padding. group: the tensor parallel group, where it has more than one rank. The entropy has a gradient only with
    `entropy_grad`. A weight with a `main_grad` (Megatron's float32 gradient buffer) gets its gradient added there.
    """
    sharded = group if group is not None and group.size() > 1 else None
    valid = weight_VH.shape[0] if rows is None else rows
    keep = torch.is_grad_enabled() and sharded is None and not entropy_grad
    logprobs_N, entropy_N = HeadLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, chunk, entropy_grad, keep, first, valid, sharded)
    return logprobs_N, entropy_N


class HeadLogprobs(torch.autograd.Function):
    """The head and what follows it as one operation."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        entropy_grad: bool,
        keep: bool,
        first: int,
        rows: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets_N)
        lse_N, mean_N, target_N, share_N = (hidden_NH.new_zeros(count, dtype=torch.float32) for _ in range(4))
        local_N = targets_N - first
        kept = None
        for at in chunks(count, chunk):
            logits = hidden_NH[at] @ weight_VH[:rows].t()
            kept = logits if keep and at.stop == count else None
            lse_N[at], mean_N[at], target_N[at], share_N[at] = reduce_logits(logits, local_N[at], temperature, group, kept is not None)
        logprobs_N, entropy_N = target_N - lse_N, lse_N - mean_N
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, lse_N, entropy_N, logprobs_N, share_N, kept)
        ctx.settings = temperature, chunk, entropy_grad, rows, group
        ctx.param = weight_VH if hasattr(weight_VH, "main_grad") else None  # autograd hands back copies without attributes
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, local_N, lse_N, entropy_N, logprobs_N, share_N, kept = ctx.saved_tensors
        temperature, chunk, entropy_grad, rows, group = ctx.settings
        weight = weight_VH[:rows]
        grad_hidden_NH = torch.empty_like(hidden_NH)
        total = WeightGrad(weight_VH, ctx.param, rows)
        for at in reversed(list(chunks(len(local_N), chunk))):
            waiting = kept is not None and at.stop == len(local_N)
            logits = kept if waiting else hidden_NH[at] @ weight.t()
            scale_C = upstream[0][at].float() / temperature
            if entropy_grad:
                grad, factor_C = grad_with_entropy(logits, local_N[at], lse_N[at], scale_C, upstream[1][at] / temperature, entropy_N[at], temperature), None
            else:
                grad, factor_C = less_target(logits, local_N[at], lse_N[at], logprobs_N[at], share_N[at] if waiting else None, temperature)
                factor_C = -scale_C * factor_C
            torch.mm(grad, weight, out=grad_hidden_NH[at])
            total.add(grad, scaled(hidden_NH[at], factor_C))
            if factor_C is not None:
                grad_hidden_NH[at] *= factor_C[:, None]
        if group is not None:
            dist.all_reduce(grad_hidden_NH, group=group)
        return grad_hidden_NH, total.result(), *[None] * 8


class WeightGrad:
    """Sum of a weight's gradient over chunks, in float32: straight into its gradient buffer where there is one."""

    def __init__(self, weight_VH: Tensor, param: Tensor | None, rows: int) -> None:
        self.weight_VH, self.param, self.rows = weight_VH, param, rows
        self.sum_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if param is None else None

    def add(self, grad_CV: Tensor, hidden_CH: Tensor) -> None:
        if self.sum_VH is None:
            grads.add_product(self.param, grad_CV, hidden_CH)
        else:
            self.sum_VH[: self.rows].add_(grad_CV.t() @ hidden_CH)

    def result(self) -> Tensor | None:
        """What autograd is told: nothing where the gradient has already been added."""
        return None if self.sum_VH is None else self.sum_VH.to(self.weight_VH.dtype)


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices that cut `count` items into runs of at most `size`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def reduce_logits(
    logits_CV: Tensor, local_C: Tensor, temperature: float, group: dist.ProcessGroup | None, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(lse, sum p z, z of the target, exp(max z - lse)), [C] float32 each, over the whole vocabulary.

    local_C: targets numbered from this rank's first row. keep: leave exp(z - max z) in place of the logits, to which the last answer belongs.
    """
    count, width = logits_CV.shape
    largest_C = torch.empty(count, dtype=torch.float32, device=logits_CV.device)
    sum_C, weighted_C, target_C = (torch.empty_like(largest_C) for _ in range(3))
    for at in chunks(count, max(1, BLOCK_ELEMENTS // width)):
        z = logits_CV[at].to(torch.float32, copy=True)
        if temperature != 1.0:
            z.div_(temperature)
        target_C[at] = z.gather(1, local_C[at].clamp(0, width - 1)[:, None])[:, 0]
        torch.amax(z, -1, out=largest_C[at])
        e = z.sub_(largest_C[at, None]).exp()
        torch.sum(e, -1, out=sum_C[at])
        if keep:
            logits_CV[at].copy_(e)
        torch.sum(z.mul_(e), -1, out=weighted_C[at])
    weighted_C += sum_C * largest_C  # of z itself, no longer of z less the largest
    if group is not None:
        return *reduce_over_ranks(largest_C, sum_C, weighted_C, target_C * ((local_C >= 0) & (local_C < width)), group), largest_C
    return sum_C.log() + largest_C, weighted_C / sum_C, target_C, 1 / sum_C


def reduce_over_ranks(largest_C: Tensor, sum_C: Tensor, weighted_C: Tensor, target_C: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Join what the ranks found in their slices of the vocabulary, each relative to its own largest z; target is 0 where it lies elsewhere."""
    overall_C = largest_C.clone()
    dist.all_reduce(overall_C, op=dist.ReduceOp.MAX, group=group)
    share_C = torch.exp(largest_C - overall_C)
    sums_3C = torch.stack([sum_C * share_C, weighted_C * share_C, target_C])
    dist.all_reduce(sums_3C, group=group)
    return sums_3C[0].log() + overall_C, sums_3C[1] / sums_3C[0], sums_3C[2]


def shifted(logits: Tensor, shift_C: Tensor, temperature: float) -> Tensor:
    """logits / temperature - shift, as new float32 values."""
    z = logits.to(torch.float32, copy=True)
    if temperature != 1.0:
        z.div_(temperature)
    return z.sub_(shift_C[:, None])


def less_target(
    logits_CV: Tensor, local_C: Tensor, lse_C: Tensor, logprobs_C: Tensor, share_C: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """(p - 1[y]) / factor, written over `logits_CV`, and that factor [C]. share_C: the logits are exponentials already, of which p is this share."""
    width = logits_CV.shape[1]
    if share_C is None:
        share_C = torch.ones_like(lse_C)
        for at in chunks(len(logits_CV), max(1, BLOCK_ELEMENTS // width)):
            logits_CV[at].copy_(shifted(logits_CV[at], lse_C[at], temperature).exp_())
    mine_C, places_C = (local_C >= 0) & (local_C < width), local_C.clamp(0, width - 1)
    target_C = (torch.expm1(logprobs_C) / share_C).to(logits_CV.dtype)  # made anew: p - 1 of what was rounded would be nothing where p is near 1
    targets = torch.arange(len(places_C), device=places_C.device), places_C  # indexing writes in place, where scatter_ copies everything twice
    logits_CV[targets] = torch.where(mine_C, target_C, logits_CV[targets])
    return logits_CV, share_C


def grad_with_entropy(
    logits_CV: Tensor, local_C: Tensor, lse_C: Tensor, scale_C: Tensor, entropy_grad_C: Tensor, entropy_C: Tensor, temperature: float
) -> Tensor:
    """Gradient of the logits where the entropy has one too, written over them. scale_C, entropy_grad_C: gradients of log-prob and entropy over temperature."""
    width = logits_CV.shape[1]
    for at in chunks(len(logits_CV), max(1, BLOCK_ELEMENTS // width)):
        log_p = shifted(logits_CV[at], lse_C[at], temperature)
        p = log_p.exp()
        grad = log_p.add_(entropy_C[at, None]).mul_(-entropy_grad_C[at, None]).sub_(scale_C[at, None]).mul_(p)
        mine = (local_C[at] >= 0) & (local_C[at] < width)
        grad.scatter_add_(1, local_C[at].clamp(0, width - 1)[:, None], (scale_C[at] * mine)[:, None])
        logits_CV[at].copy_(grad)
    return logits_CV


def scaled(hidden_CH: Tensor, factor_C: Tensor | None) -> Tensor:
    """Hidden states times one number each."""
    return hidden_CH if factor_C is None else (hidden_CH * factor_C[:, None]).to(hidden_CH.dtype)
