"""How one Megatron parameter is made of HF tensors, as data: the same rule loads, gathers, exports and converts it.

A parameter, or a tensor-parallel shard of it, is a row of segments along one axis. A segment is a range of a HF tensor (or padding).
Reading a shard is joining its segments; giving it back is laying each segment into its place in the HF tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PADDING = -1
FIRST, LAST = "first", "last"  # chunks of the pipeline, for what belongs to no layer


@dataclass(frozen=True, slots=True)
class Source:
    """A HF tensor by name, and the shape that the model's config asks of it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Range [start, stop) along the rule's axis of `rule.sources[source]`; source PADDING: so many rows of zeros."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter with global layer and expert numbers.

    `axis` is the one that tensor parallelism splits (None: every rank holds the whole). `order` says how the sources follow one another:
    "whole" one source; "each" every source is split on its own and the pieces are joined (gate, up);
    "groups" `unit` rows of each source in turn, then split (query, key and value a KV group);
    "padded" one source, filled up with rows of zeros until the parts are equal (vocabulary).
    """

    name: str
    sources: tuple[Source, ...]
    axis: int | None
    place: int | str  # the layer, or FIRST or LAST
    order: str = "whole"
    unit: tuple[int, ...] = ()
    expert: int | None = None
    copy: bool = False  # a second home of a HF tensor (the tied head on the last stage): loaded, never given back
    buffer: bool = False  # a persistent buffer of the module, not a parameter

    def segments(self, parts: int, rank: int) -> list[Segment]:
        """The segments of shard `rank` of `parts`, in order."""
        if self.axis is None:
            return self._sequence(1)
        if self.order == "each":
            return [Segment(i, size * rank // parts, size * (rank + 1) // parts) for i, size in enumerate(self._sizes())]
        sequence = self._sequence(parts)
        length = sum(s.stop - s.start for s in sequence)
        return _cut(sequence, length * rank // parts, length * (rank + 1) // parts)

    def divides(self, parts: int) -> bool:
        """True where `parts` shards of this parameter are equal in size."""
        if self.axis is None or self.order == "padded":
            return True
        if self.order == "groups":
            heads, unit = self._sizes()[0], self.unit
            groups, per_group = heads // unit[0], unit[0] // unit[-1]
            return (groups * per_group) % parts == 0 and (groups % parts == 0 or parts % groups == 0)
        return all(size % parts == 0 for size in self._sizes())

    def shape(self, parts: int) -> tuple[int, ...]:
        """Shape of one of `parts` equal shards."""
        axis = self.axis or 0
        rows = sum(s.stop - s.start for s in self.segments(parts, 0))
        first = self.sources[0].shape
        return (*first[:axis], rows, *first[axis + 1 :])

    def _sizes(self) -> list[int]:
        return [source.shape[self.axis or 0] for source in self.sources]

    def _sequence(self, parts: int) -> list[Segment]:
        """The segments of the whole parameter, padded for `parts`."""
        sizes = self._sizes()
        if self.order == "groups":
            count = sizes[0] // self.unit[0]
            return [Segment(i, n * unit, (n + 1) * unit) for n in range(count) for i, unit in enumerate(self.unit)]
        sequence = [Segment(i, 0, size) for i, size in enumerate(sizes)]
        if self.order == "padded" and sizes[0] % parts:
            sequence.append(Segment(PADDING, 0, padded(sizes[0], parts) - sizes[0]))
        return sequence


def padded(rows: int, parts: int) -> int:
    """`rows` rounded up to a multiple of `parts`."""
    return -(-rows // parts) * parts


def _cut(sequence: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What lies in [start, stop) when the segments are laid end to end."""
    cut, at = [], 0
    for s in sequence:
        low, high = max(start, at), min(stop, at + s.stop - s.start)
        if low < high:
            cut.append(Segment(s.source, s.start + low - at, s.start + high - at))
        at += s.stop - s.start
    return cut


def join(rule: Rule, parts: int, rank: int, read: Callable[[str, int | None, int, int], torch.Tensor]) -> torch.Tensor:
    """Shard `rank` of `parts`, made of what `read(hf_name, axis, start, stop)` returns for each range (axis None: all of it)."""
    import torch

    pieces: list[torch.Tensor | None] = []
    segments = rule.segments(parts, rank)
    axis = rule.axis or 0
    for s in segments:
        whole = s.source != PADDING and s.start == 0 and s.stop == rule.sources[s.source].shape[axis]
        pieces.append(None if s.source == PADDING else read(rule.sources[s.source].name, None if whole else axis, s.start, s.stop))
    for i, s in enumerate(segments):
        if pieces[i] is None:
            like = next((p for p in pieces if p is not None), None)
            shape = list(rule.sources[0].shape)
            shape[axis] = s.stop - s.start
            pieces[i] = torch.zeros(shape, dtype=like.dtype if like is not None else None)
    tensors = [p for p in pieces if p is not None]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=axis)


def pieces(rule: Rule, shards: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(source, start, piece) of every part of `rule`'s HF tensors: `piece` lies in source number `source` from `start` on along the rule's axis.

    `shards` are all shards in rank order. Padding is left out, also where there is more of it than `parts` asks for.
    """
    axis, at = rule.axis or 0, 0
    if rule.order in ("whole", "padded"):
        size = rule.sources[0].shape[axis]
        for shard in shards:
            length = min(shard.shape[axis], size - at)
            if length > 0:
                yield 0, at, shard.narrow(axis, 0, length)
                at += length
        return
    for rank, shard in enumerate(shards):
        at = 0
        for s in rule.segments(len(shards), rank):
            yield s.source, s.start, shard.narrow(axis, at, s.stop - s.start)
            at += s.stop - s.start


def lay(rule: Rule, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The HF tensors of `rule`, in the order of its sources, from all its shards in rank order, padding dropped."""
    import torch

    axis = rule.axis or 0
    if len(shards) == 1 and rule.order in ("whole", "padded"):
        return [piece for _, _, piece in pieces(rule, shards)]
    whole = [torch.empty(source.shape, dtype=shards[0].dtype, device=shards[0].device) for source in rule.sources]
    for source, start, piece in pieces(rule, shards):
        whole[source].narrow(axis, start, piece.shape[axis]).copy_(piece)
    return whole
