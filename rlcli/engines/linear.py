"""Megatron's parallel linears with a backward pass of our own: the weight's gradient goes straight into its float32 buffer.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from rlcli.engines import grads

Tensor = torch.Tensor


class Linear(torch.autograd.Function):
    """x W' + b of x [..., I], W [O, I] and b [O] or None; the input's gradient is summed over `group`, where there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        ctx.param = weight if hasattr(weight, "main_grad") else None  # autograd hands back copies without attributes
        out = x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = upstream[0]
        grad_x = grad @ weight
        pending = dist.all_reduce(grad_x, group=ctx.group, async_op=True) if ctx.group is not None else None
        grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_weight = None
        if ctx.param is not None:
            grads.add_product(ctx.param, grad_TO, x_TI)
        else:
            grad_weight = grad_TO.t() @ x_TI
        if pending is not None:
            pending.wait()
        return grad_x, grad_weight, grad_TO.sum(0) if ctx.has_bias else None, None


class ColumnLinear(ColumnParallelLinear):
    """Split by output: every rank has the whole input and adds its part of the input's gradient."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *, bias: Tensor | None, allreduce_dgrad: bool, tp_group: Any, **unused: Any) -> Tensor:
        return Linear.apply(input, weight, bias, tp_group if allreduce_dgrad else None)


class RowLinear(RowParallelLinear):
    """Split by input: Megatron sums the outputs."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *, bias: Tensor | None, **unused: Any) -> Tensor:
        return Linear.apply(input, weight, bias, None)
