"""Where one rank stands in a parallel layout, as plain numbers: usable with or without live process groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlcli.errors import UserError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and ranks of tensor (TP), pipeline (PP), expert (EP) and expert tensor (ETP) parallelism.

    `virtual` is the number of model chunks of a pipeline rank (VPP) and `chunk` the one meant. `stages` gives the layers of each
    pipeline chunk in model order (chunk-major: chunk 0 of every rank, then chunk 1); empty: the same number each.
    """

    tensor: int = 1
    tensor_rank: int = 0
    pipeline: int = 1
    pipeline_rank: int = 0
    expert: int = 1
    expert_rank: int = 0
    expert_tensor: int = 1
    expert_tensor_rank: int = 0
    virtual: int = 1
    chunk: int = 0
    stages: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """This chunk holds the embedding."""
        return self.pipeline_rank == 0 and self.chunk == 0

    @property
    def is_last(self) -> bool:
        """This chunk holds the final norm and the head."""
        return self.pipeline_rank == self.pipeline - 1 and self.chunk == self.virtual - 1

    def layers(self, total: int) -> range:
        """Global numbers of the layers in this chunk of a model with `total` layers."""
        counts = self.stages or (total // (self.pipeline * self.virtual),) * (self.pipeline * self.virtual)
        if len(counts) != self.pipeline * self.virtual or sum(counts) != total or min(counts) < 0:
            raise UserError(f"{total} layers do not divide over pipeline={self.pipeline}" + (f" x virtual={self.virtual}" if self.virtual > 1 else "")
                            + (f" as {','.join(map(str, self.stages))}" if self.stages else "") + "; choose another pipeline size")
        index = self.chunk * self.pipeline + self.pipeline_rank
        start = sum(counts[:index])
        return range(start, start + counts[index])

    def experts(self, total: int) -> range:
        """Global numbers of the experts that this rank holds."""
        if total % self.expert:
            raise UserError(f"{total} experts do not divide over expert={self.expert}; choose a divisor")
        each = total // self.expert
        return range(self.expert_rank * each, (self.expert_rank + 1) * each)

    def split(self, expert: bool) -> tuple[int, int]:
        """(parts, rank) of the group that shards a parameter: the expert tensor group for experts, else the tensor group."""
        return (self.expert_tensor, self.expert_tensor_rank) if expert else (self.tensor, self.tensor_rank)


def ranks(layout: Layout) -> Iterator[Layout]:
    """Every distinct holder of weights in `layout`'s sizes: pipeline ranks, chunks, tensor ranks and expert ranks."""
    sizes = (layout.pipeline, layout.virtual, layout.tensor, layout.expert, layout.expert_tensor)
    for pipeline, chunk, tensor, expert, expert_tensor in product(*map(range, sizes)):
        yield replace(layout, pipeline_rank=pipeline, chunk=chunk, tensor_rank=tensor, expert_rank=expert, expert_tensor_rank=expert_tensor)
