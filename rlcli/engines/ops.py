"""Norm, rotary embedding and SwiGLU in few passes over memory, each one operation for autograd; the same values as transformers gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

Tensor = torch.Tensor

BLOCK_ELEMENTS = 1 << 18  # a MiB in float32: a few such blocks fit into the second-level caches of two cores


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps), rounded to the dtype of x, times the weight; the arithmetic before that in float32 (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return Normalise.apply(x, self.weight, self.eps)


class Normalise(torch.autograd.Function):
    """With n = x r and r = 1 / sqrt(mean(x^2) + eps): dx = r (g - n mean(g n)), where g is the gradient times the weight.

    Rows are taken in blocks, whose float32 intermediates stay in a core's cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.reshape(-1, x.shape[-1]), x.shape[-1]
        out, scale = torch.empty_like(rows), torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        for at in blocks(rows):
            normed, r = rows[at].to(torch.float32, copy=True), scale[at]
            torch.linalg.vector_norm(normed, dim=-1, keepdim=True, out=r)
            r.square_().div_(size).add_(eps).rsqrt_()
            out[at].copy_(normed.mul_(r)).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, upstream, size = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, x.shape[-1]), x.shape[-1]
        out, weight32 = torch.empty_like(rows), weight.float()
        grad_weight = torch.zeros_like(weight32)
        for at in blocks(rows):
            normed = rows[at].to(torch.float32, copy=True).mul_(scale[at])
            grad = upstream[at].to(torch.float32, copy=True)
            product = grad * normed
            grad_weight += product.sum(0)
            mean = torch.mv(product, weight32).div_(size).unsqueeze(-1)
            out[at].copy_(grad.mul_(weight32).addcmul_(normed, mean, value=-1).mul_(scale[at]))
        return out.view(x.shape), grad_weight.to(weight.dtype), None


def blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows to take at a time: all of them, but on a CPU only what its cache holds."""
    step = max(1, BLOCK_ELEMENTS // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    return (slice(start, start + step) for start in range(0, len(rows), step))


class Rotate(torch.autograd.Function):
    """Rotary embedding of x [T, ..., D] by the angles whose cosines and sines [T, ..., D / 2] are given: pairs are (i, i + D / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) of the halves a and b of x's last dimension."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (first, second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin)
    return out


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of x = [gate, up] (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return (out,)
