"""Packing of training rows into micro-batches: a hard bound on tokens, few micro-batches, even work for all data parallel ranks.

Pure numpy and fully determined by its arguments, so that every process that packs the same rows gets the same micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlcli.errors import UserError
from rlcli.types import FloatArray, TrainRow

# What one (query, key) pair of attention costs, in tokens of everything else: a layer does about 24 h^2 operations a token
# and 4 h a pair (h: hidden size), so 1 / (6 h). The default is that of h = 1024.
PAIR_COST = 1 / 6144


@dataclass(frozen=True, slots=True)
class Piece:
    """A row, or those of its responses that share one micro-batch. `shared`: its prompt is computed once for all of them."""

    row: int  # number of the row in what was packed
    responses: tuple[int, ...]  # numbers of its responses, ascending
    shared: bool
    tokens: int  # tokens that the forward pass computes
    cost: float  # work in units of one token without attention


@dataclass(slots=True)
class MicroBatch:
    """What one forward pass computes: self-contained and picklable. `rows[i]` holds just the responses of `pieces[i]`."""

    pieces: list[Piece]
    rows: list[TrainRow]

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


def pack(
    rows: Sequence[TrainRow], ranks: int, bound: int, sharing: str = "auto", pair_cost: float = PAIR_COST
) -> list[list[MicroBatch]]:
    """Cut rows into micro-batches of at most `bound` tokens for each of `ranks` data parallel ranks.

    Rows go to the ranks by Karmarkar-Karp over their cost, the quadratic part of attention included; each rank's rows go
    into as few micro-batches as best-fit decreasing finds. A rank may get no micro-batch at all.

    sharing: "on", "off", or "auto" (each row on its own: shared where that saves tokens).
    Raises UserError where a response with its prompt, or a row that must not be parted, is longer than `bound`.
    """
    pieces = [piece for number, row in enumerate(rows) for piece in cut(number, row, bound, sharing, pair_cost)]
    packed = []
    for share in spread([piece.cost for piece in pieces], ranks):
        bins = fill([pieces[i].tokens for i in share], bound)
        packed.append([micro_batch(rows, [pieces[share[i]] for i in members]) for members in bins])
    return packed


def cut(number: int, row: TrainRow, bound: int, sharing: str = "auto", pair_cost: float = PAIR_COST) -> list[Piece]:
    """The pieces of one row, each within `bound` tokens: one if it fits or must not be parted, else as few as fit.

    None for a row without a single response token: nothing of it would be computed.
    """
    if not any(len(response) for response in row.responses):
        return []
    if not len(row.prompt):
        raise UserError(f"training row {number} has an empty prompt: its first response token follows nothing, so it has no probability")
    lengths = [len(response) for response in row.responses]
    shared = share_prompt(len(row.prompt), len(lengths), sharing)
    every = tuple(range(len(lengths)))
    whole = make_piece(number, len(row.prompt), lengths, every, shared, pair_cost)
    if whole.tokens <= bound:
        return [whole]
    if not row.splittable:
        raise UserError(over_bound(number, whole.tokens, "its responses must stay together", bound))
    room = bound - len(row.prompt) if shared else bound
    weights = [length if shared else length + len(row.prompt) for length in lengths]
    if max(weights) > room:
        worst = max(lengths) + len(row.prompt)
        raise UserError(over_bound(number, worst, "prompt and longest response", bound))
    return [make_piece(number, len(row.prompt), lengths, tuple(part), shared, pair_cost) for part in fill(weights, room)]


def share_prompt(prompt: int, responses: int, sharing: str) -> bool:
    """Whether a row's prompt is computed once for all its responses; with one response there is nothing to share."""
    return sharing != "off" and responses > 1 and prompt > 0


def make_piece(number: int, prompt: int, lengths: Sequence[int], responses: tuple[int, ...], shared: bool, pair_cost: float) -> Piece:
    """The piece of row `number` that holds `responses`, with its tokens and its cost."""
    copies = 1 if shared else len(responses)
    tokens = prompt * copies + sum(lengths[i] for i in responses)
    pairs = copies * prompt * (prompt + 1) / 2 + sum(lengths[i] * (prompt + (lengths[i] + 1) / 2) for i in responses)
    return Piece(number, responses, shared, tokens, tokens + pair_cost * pairs)


def over_bound(number: int, tokens: int, what: str, bound: int) -> str:
    return f"training row {number} needs {tokens} tokens in one micro-batch ({what}), more than train.micro_batch_tokens={bound}: raise it to at least {tokens}"


def micro_batch(rows: Sequence[TrainRow], pieces: Iterable[Piece]) -> MicroBatch:
    """The micro-batch of some pieces, in the order of the rows they come from."""
    ordered = sorted(pieces, key=lambda piece: (piece.row, piece.responses))
    return MicroBatch(ordered, [part_of(rows[piece.row], piece.responses) for piece in ordered])


def part_of(row: TrainRow, responses: tuple[int, ...]) -> TrainRow:
    fields = {name: [values[i] for i in responses] for name, values in row.fields.items()}
    return TrainRow(row.prompt, [row.responses[i] for i in responses], fields, row.splittable)


def spread(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide items over ranks as evenly as the largest differencing method does (Karmarkar and Karp, 1982); ascending numbers a rank.

    Every item starts as a partial solution that gives it to one rank and nothing to the others. The two partial solutions
    with the widest spread of sums are merged, the heaviest rank of one with the lightest of the other, until one is left.
    """
    if ranks == 1:
        return [list(range(len(costs)))]
    if not costs:
        return [[] for _ in range(ranks)]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        sums: list[tuple[float, list[int]]] = [(cost, [item])] + [(0.0, []) for _ in range(ranks - 1)]
        heap.append((-cost, item, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    parts = [sorted(items) for _, items in heap[0][2]]
    return sorted(parts, key=lambda items: (not items, items))


def fill(sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Put items into as few bins of `bound` as best-fit decreasing finds; no item may be larger than a bin. Ascending numbers a bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = [b for b in range(len(bins)) if room[b] >= sizes[item]]
        if fits:
            best = min(fits, key=lambda b: (room[b], b))
        else:
            best = len(bins)
            bins.append([])
            room.append(bound)
        bins[best].append(item)
        room[best] -= sizes[item]
    return sorted(sorted(members) for members in bins)


def unpack(rows: Sequence[TrainRow], micro_batches: Iterable[MicroBatch], values: Iterable[FloatArray]) -> list[list[FloatArray]]:
    """Per-token values [N] of each micro-batch, back in the shape of `rows[i].responses`; the inverse of packing.

    Every response that has a token must be covered: ValueError otherwise.
    """
    empty = np.zeros(0, np.float32)
    out: list[list[FloatArray | None]] = [[None if len(response) else empty for response in row.responses] for row in rows]
    for batch, values_N in zip(micro_batches, values, strict=True):
        start = 0
        for piece in batch.pieces:
            for response in piece.responses:
                length = len(rows[piece.row].responses[response])
                out[piece.row][response] = np.asarray(values_N[start : start + length], dtype=np.float32)
                start += length
    full = [[array for array in row if array is not None] for row in out]
    if any(len(have) != len(row.responses) for have, row in zip(full, rows, strict=True)):
        raise ValueError("the micro-batches do not cover every response of the rows")
    return full
