"""Weights and gradients of this rank's stage as whole HF tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from rlcli.models.gather import Groups, hf_tensors
from rlcli.models.layout import Layout
from rlcli.models.spec import ModelSpec

Tensor = torch.Tensor


def groups() -> Groups:
    """The process groups that shards are gathered over."""
    return Groups(parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group())


def whole_weights(model: torch.nn.Module, spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of this stage in `dtype`, given to the first tensor rank; all tensor ranks iterate in step."""
    for name, tensor in hf_tensors(model, spec, layout, groups()):
        yield name, tensor.to(dtype)


class GradientsOf(torch.nn.Module):
    """A model's float32 gradient buffers in place of its weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pairs = [(name, param.main_grad) for name, param in model.named_parameters()]

    def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return iter(self.pairs)


def whole_gradients(model: torch.nn.Module, spec: ModelSpec, layout: Layout) -> list[tuple[str, Tensor]]:
    """(HF name, whole gradient) of this stage in float32, copied; for the first tensor rank, others get nothing."""
    return [(name, tensor.float().clone()) for name, tensor in hf_tensors(GradientsOf(model), spec, layout, groups())]
