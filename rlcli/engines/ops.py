"""Norm, rotary embedding and SwiGLU in few passes over memory, each one operation for autograd; the same values as transformers gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

Tensor = torch.Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps), rounded to the dtype of x, times the weight; the arithmetic before that in float32 (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return Normalise.apply(x, self.weight, self.eps)


class Normalise(torch.autograd.Function):
    """With n = x r and r = 1 / sqrt(mean(x^2) + eps): dx = r (g - n mean(g n)), where g is the gradient times the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.linalg.vecdot(x32, x32).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x32, scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = grads[0].float()
        grad_weight = torch.linalg.vecdot(grad.flatten(0, -2), normed.flatten(0, -2), dim=0)
        grad = grad * weight.float()
        mean = torch.linalg.vecdot(grad, normed).div_(x.shape[-1]).unsqueeze(-1)
        return grad.addcmul_(normed, mean, value=-1).mul_(scale).to(x.dtype), grad_weight.to(weight.dtype), None


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
