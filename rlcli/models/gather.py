"""Live Megatron weights back to whole HF tensors, one parameter at a time: for weight sync and for export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcli.models.layout import Layout
from rlcli.models.load import pair
from rlcli.models.rules import lay
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups that shards are gathered over; None where the group has one member."""

    tensor: Any = None
    expert_tensor: Any = None


def hf_tensors(model: torch.nn.Module, spec: ModelSpec, layout: Layout, groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (hf_name, tensor) of all that this pipeline stage and expert rank holds, whole, in the model's dtype.

    A collective: every rank of the tensor group must exhaust the iterator, in step; only its rank 0 is given tensors. A tied head's copy
    is not yielded. A yielded tensor may share memory with the live parameter: use it before the next update, and do not write to it.
    """
    for rule, live in pair(model, spec, layout):
        if rule.copy:
            continue
        expert = rule.expert is not None
        parts, rank = layout.split(expert)
        group = groups.expert_tensor if expert else groups.tensor
        shards = [live.detach()] if parts == 1 or rule.axis is None else _gather(live.detach(), parts, rank, group)
        if rank == 0:
            yield from zip((s.name for s in rule.sources), lay(rule, shards), strict=True)


def _gather(shard: torch.Tensor, parts: int, rank: int, group: Any) -> list[torch.Tensor]:
    """All shards in rank order on rank 0 of the group, an empty list elsewhere."""
    import torch
    import torch.distributed as dist

    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(parts)] if rank == 0 else None
    dist.gather(shard, shards, group=group, group_dst=0)
    return shards or []
