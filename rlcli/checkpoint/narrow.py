"""Finding weights that another dtype has no number for, before they become infinite without a word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlcli.errors import UserError
from rlcli.models.rules import Rule

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 20  # values looked at in turn where the quick look found something


def check_range(rule: Rule, parts: Iterable[tuple[int, torch.Tensor]], dtype: str, where: object) -> None:
    """UserError for finite values that become infinite in `dtype`. `parts`: (number of the source of `rule`, some of its tensor)."""
    for number, tensor in parts:
        if overflows(tensor, dtype):
            wider = "float32" if dtype == "bfloat16" else "bfloat16 or float32"
            raise UserError(f"{where}: {rule.sources[number].name} would overflow to infinity in {dtype}; take --dtype {wider}")


def overflows(tensor: torch.Tensor, dtype: str) -> bool:
    """Whether a finite value of `tensor` becomes infinite in `dtype`. Free where that cannot be, one quick look where it can."""
    import torch

    wanted = getattr(torch, dtype)
    most = torch.finfo(wanted).max
    if most >= torch.finfo(tensor.dtype).max or not tensor.numel():
        return False
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if -most <= low and high <= most:  # false where there is a NaN
        return False
    blocks = tensor.reshape(-1).split(_BLOCK)
    return any(bool((torch.isfinite(block) & ~torch.isfinite(block.to(wanted))).any()) for block in blocks)
