"""Exact attention over packed segments with shared prompts, on torch's scaled dot product attention (SDPA) or, on a CPU, on plain matrix products.

Each response sees its prompt and itself, no other response and no other segment. Short segments are taken together, several
in one masked call, padded a little where their lengths differ; long ones one by one, the prompt and then each response in blocks
of queries against the keys they may see, so that no [length x length] mask ever stands whole. Everything that does not change
between layers is worked out once a micro-batch, in a Plan.

Suffixes: T packed tokens, K key-value heads, R query heads for each of them, D head size, B segments of a batch, L their length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rlcli.engines.lanes import side_by_side
from rlcli.engines.packed import Segment

Tensor = torch.Tensor

SHORT = 256  # tokens up to which a segment is taken whole, with its own [L, L] mask
ALIKE = 0.8  # segments share a batch if the shortest has at least this share of the longest one's tokens
DENSE = 1024  # keys up to which scores are made and kept for the backward pass on a CPU: plain matrix products, which beat torch's fused kernel there
BATCH_TOKENS = 8192  # padded tokens of a batch of short segments, which bounds the memory of its masks
BLOCK = 256  # queries of a long segment that are taken at once


@dataclass(frozen=True, slots=True)
class Batch:
    """Short segments taken together: `rows` B, padded to `length` L; `mask` [B or 1, 1, L * R, L] is added to the scores."""

    rows: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """A long segment: a causal prompt, then each response (from, to, counted from the segment's start), in blocks of queries."""

    segment: Segment
    responses: tuple[tuple[int, int], ...]
    mask: Tensor  # [BLOCK, longest + BLOCK]: zeros, then a causal square at the right; every block takes a view of it

    @property
    def longest(self) -> int:
        """Most keys that a query sees."""
        return self.mask.shape[1] - BLOCK

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(from, to, tokens of the prompt that all of these see) of the prompt and of each response."""
        if self.segment.prompt:
            yield 0, self.segment.prompt, 0
        for begin, end in self.responses:
            yield begin, end, self.segment.prompt

    def causal(self, rows: int, seen: int) -> Tensor:
        """[rows, seen] of 0 and -inf: the last `rows` of `seen` keys are the queries' own places."""
        return self.mask[:rows, self.longest + rows - seen : self.longest + rows]


@dataclass(slots=True)
class Plan:
    """What attention and rotary embedding need of one micro-batch, in every layer the same.

    cos_T, sin_T: [T, 1, 1, D / 2] in the dtype of the model.
    gather: tokens in the order in which the parts take them, padding included; None where that is the packed order.
    scatter: for each packed token, where it stands in that order. padding: which places of that order hold no token.
    """

    cos_T: Tensor
    sin_T: Tensor
    parts: list[Batch | Blocks]
    gather: Tensor | None = None
    scatter: Tensor | None = None
    padding: Tensor | None = None


def plan(segments: Sequence[Segment], cos_T: Tensor, sin_T: Tensor, ratio: int, dtype: torch.dtype) -> Plan:
    """Work out how to attend over `segments`; `ratio` is R, the query heads for each key-value head of this rank."""
    groups = alike(segments)
    parts: list[Batch | Blocks] = []
    order: list[Tensor] = []
    for group in groups:
        longest = group[0].length
        if longest > SHORT:
            parts.append(long_part(group[0], dtype))
        else:
            parts.append(Batch(len(group), longest, batch_mask(group, ratio, dtype)))
        order += [places(segment, longest) for segment in group]
    gather = torch.cat(order)
    tokens = len(cos_T)
    if len(gather) == tokens and bool((gather == torch.arange(tokens)).all()):
        return Plan(cos_T, sin_T, parts)
    padding = gather < 0
    scatter = torch.empty(tokens, dtype=torch.int64)
    scatter[gather[~padding]] = torch.arange(len(gather))[~padding]
    return Plan(cos_T, sin_T, parts, gather.clamp(min=0), scatter, padding if bool(padding.any()) else None)


def alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments by falling length, those that are short and of nearly equal length together; equal lengths keep their order."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (-s.length, s.start)):
        last = groups[-1] if groups else None
        longest = last[0].length if last else 0
        fits = last is not None and longest <= SHORT and segment.length >= ALIKE * longest and (len(last) + 1) * longest <= BATCH_TOKENS
        if last is not None and fits:
            last.append(segment)
        else:
            groups.append([segment])
    return groups


def places(segment: Segment, length: int) -> Tensor:
    """Numbers of a segment's tokens, then -1 up to `length`."""
    out = torch.full((length,), -1, dtype=torch.int64)
    out[: segment.length] = torch.arange(segment.start, segment.start + segment.length)
    return out


def batch_mask(group: Sequence[Segment], ratio: int, dtype: torch.dtype) -> Tensor:
    """[B or 1, 1, L * R, L] of 0 and -inf; the R query heads of a token stand next to one another."""
    length = group[0].length
    if all((segment.prompt, segment.responses) == (group[0].prompt, group[0].responses) for segment in group):
        group = group[:1]
    seen = torch.stack([sees(segment, length) for segment in group])
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(ratio, dim=1)[:, None]


def sees(segment: Segment, length: int) -> Tensor:
    """[L, L] bool: which keys each token of a segment sees. Padding sees the first token, so that its softmax stays finite."""
    response = torch.zeros(length, dtype=torch.int64)
    lengths = torch.tensor(segment.responses, dtype=torch.int64)
    response[segment.prompt : segment.length] = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
    mine = (response[:, None] == response[None]) | (response[None] == 0)
    seen = mine & torch.ones(length, length, dtype=torch.bool).tril()
    seen[segment.length :] = False
    seen[segment.length :, 0] = True
    return seen


def long_part(segment: Segment, dtype: torch.dtype) -> Blocks:
    """The responses of a long segment that have a token, and the mask of all their blocks."""
    ends = list(itertools.accumulate(segment.responses, initial=segment.prompt))
    responses = tuple((begin, end) for begin, end in itertools.pairwise(ends) if end > begin)
    keys = segment.prompt + max(segment.responses, default=0)
    mask = torch.zeros(BLOCK, keys + BLOCK, dtype=dtype)
    mask[:, keys:].masked_fill_(torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1), float("-inf"))
    return Blocks(segment, responses, mask)


def attend(q_KTRD: Tensor, k_KTD: Tensor, v_KTD: Tensor, how: Plan, scale: float) -> Tensor:
    """Attention of packed queries over packed keys and values: [T, K * R * D], differentiable."""
    if how.gather is not None and how.scatter is not None:
        q_KTRD, k_KTD, v_KTD = (Reorder.apply(x, 1, how.gather, how.scatter, None) for x in (q_KTRD, k_KTD, v_KTD))
    sizes = [part.rows * part.length if isinstance(part, Batch) else part.segment.length for part in how.parts]
    out: list[Tensor] = []
    kept: list[tuple[int, Blocks, Tensor, Tensor, Tensor]] = []
    for part, q, k, v in zip(how.parts, *(x.split(sizes, 1) for x in (q_KTRD, k_KTD, v_KTD)), strict=True):
        if isinstance(part, Batch):
            out.append(attend_batch(q, k, v, part, scale))
        elif keeps_scores(q, part):
            kept.append((len(out), part, q, k, v))
            out.append(q)  # until all that are taken so are known
        else:
            out.append(attend_long(q, k, v, part, scale))
    if kept:
        done = LongAttention.apply([part for _, part, *_ in kept], scale, *(tensor for _, _, *qkv in kept for tensor in qkv))
        for (number, *_), result in zip(kept, done, strict=True):
            out[number] = result
    joined = out[0] if len(out) == 1 else torch.cat(out)
    if how.gather is not None and how.scatter is not None:
        return Reorder.apply(joined, 0, how.scatter, how.gather, how.padding)
    return joined


def attend_batch(q: Tensor, k: Tensor, v: Tensor, part: Batch, scale: float) -> Tensor:
    """Short segments in one call; the R query heads of a token are taken as further queries of their key-value head."""
    heads, _, ratio, size = q.shape
    if q.device.type == "cpu" and part.length <= DENSE:
        flat = (x.reshape(heads * part.rows, -1, size) for x in (q, k, v))
        return DenseAttention.apply(*flat, part.mask[:, 0], part.mask[:, 0].shape, scale).view(heads, -1, ratio, size).transpose(0, 1).flatten(1)
    q = q.reshape(heads, part.rows, part.length * ratio, size).transpose(0, 1)
    k, v = (x.unflatten(1, (part.rows, part.length)).transpose(0, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=part.mask, scale=scale)  # [B, K, L * R, D]
    out = out.unflatten(2, (part.length, ratio)).permute(0, 2, 1, 3, 4)
    return out.reshape(part.rows * part.length, heads * ratio * size)


def keeps_scores(q: Tensor, part: Blocks) -> bool:
    """Whether a long segment is taken with scores that are kept; with or without a backward pass alike, so that log-probs are the same bits in both."""
    return q.device.type == "cpu" and part.longest <= DENSE


def attend_long(q: Tensor, k: Tensor, v: Tensor, part: Blocks, scale: float) -> Tensor:
    """A long segment: the prompt, then block after block of each response over the prompt and the response so far."""
    ratio = q.shape[2]
    q = q.transpose(1, 2)  # [K, R, T, D]
    out = []
    for begin, end, first in part.runs():
        keys, values = (behind_prompt(x, first, begin, end)[:, None].expand(-1, ratio, -1, -1) for x in (k, v))
        if begin == 0:  # nothing stands before these queries: plain causal attention
            out.append(F.scaled_dot_product_attention(q[:, :, begin:end], keys, values, is_causal=True, scale=scale))
            continue
        for start, stop, seen in blocks_of(begin, end, first):
            block = q[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen]
            out.append(F.scaled_dot_product_attention(*block, attn_mask=part.causal(stop - start, seen), scale=scale))
    joined = torch.cat(out, dim=2)  # [K, R, T, D]
    return joined.permute(2, 0, 1, 3).reshape(joined.shape[2], -1)


def behind_prompt(x: Tensor, prompt: int, begin: int, end: int) -> Tensor:
    """Keys or values of the prompt's first tokens and a run of tokens, one after the other, [K, P + T_i, D]; joined once for all blocks of the run."""
    return x[:, :end] if begin == prompt else torch.cat([x[:, :prompt], x[:, begin:end]], dim=1)


class LongAttention(torch.autograd.Function):
    """As `attend_long` of each of several segments, the scores of each block made by plain products and kept.

    Inputs are the segments, the scale, then q, k and v of each. The R query heads of a token are further queries of their key-value head.
    A segment's operations are small: segments are computed side by side, each alone, gradients added up in place, keys' and values' in float32.
    """

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Blocks], scale: float, *qkv: Tensor) -> tuple[Tensor, ...]:
        done = side_by_side(lambda item: attended(item[0], item[1:], scale), list(zip(parts, qkv[::3], qkv[1::3], qkv[2::3], strict=True)))
        ctx.save_for_backward(*qkv, *(weight for _, weights in done for weight in weights))
        ctx.parts, ctx.scale, ctx.blocks = parts, scale, [len(weights) for _, weights in done]
        return tuple(out for out, _ in done)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        qkv = [tuple(itertools.islice(saved, 3)) for _ in ctx.parts]
        weights = [tuple(itertools.islice(saved, count)) for count in ctx.blocks]
        done = side_by_side(lambda item: attended_backward(item[0], item[1], item[2], item[3], ctx.scale), list(zip(ctx.parts, qkv, weights, grads, strict=True)))
        return None, None, *itertools.chain(*done)


def attended(part: Blocks, qkv: tuple[Tensor, ...], scale: float) -> tuple[Tensor, list[Tensor]]:
    """Attention of one segment, [T, K * R * D], and the weights of its blocks."""
    q, k, v = qkv
    heads, tokens, ratio, size = q.shape
    out = q.new_empty(tokens, heads, ratio, size)
    weights = []
    for begin, end, first in part.runs():
        keys, values = (behind_prompt(x, first, begin, end) for x in (k, v))
        for start, stop, seen in blocks_of(begin, end, first):
            queries = q[:, start:stop].reshape(heads, -1, size)
            scores = torch.bmm(queries, keys[:, :seen].transpose(1, 2))
            by_token = scores.view(heads, stop - start, ratio, seen)
            torch.add(part.causal(stop - start, seen)[:, None], by_token, alpha=scale, out=by_token)
            weights.append(torch.softmax(scores, -1))
            out[start:stop] = torch.bmm(weights[-1], values[:, :seen]).view(heads, -1, ratio, size).transpose(0, 1)
    return out.flatten(1), weights


def attended_backward(part: Blocks, qkv: tuple[Tensor, ...], weights: Sequence[Tensor], grad_out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one segment."""
    q, k, v = qkv
    heads, tokens, ratio, size = q.shape
    upstream = grad_out.view(tokens, heads, ratio, size).transpose(0, 1)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    left = iter(weights)
    for begin, end, first in part.runs():
        keys, values = (behind_prompt(x, first, begin, end) for x in (k, v))
        for start, stop, seen in blocks_of(begin, end, first):
            p, queries, above = next(left), *(x[:, start:stop].reshape(heads, -1, size) for x in (q, upstream))
            add_behind_prompt(grad_v, torch.bmm(p.transpose(1, 2), above), first, begin)
            grad = torch.bmm(above, values[:, :seen].transpose(1, 2))
            grad = torch.ops.aten._softmax_backward_data(grad, p, -1, p.dtype)
            torch.mul(torch.bmm(grad, keys[:, :seen]).view(heads, -1, ratio, size), scale, out=grad_q[:, start:stop])
            add_behind_prompt(grad_k, torch.bmm(grad.transpose(1, 2), queries), first, begin)
    return grad_q, grad_k.mul_(scale).to(k.dtype), grad_v.to(v.dtype)


def blocks_of(begin: int, end: int, first: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, keys seen by the last) of a run's queries, BLOCK at a time, where all see the prompt's `first` tokens."""
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        yield start, stop, first + stop - begin


def add_behind_prompt(total: Tensor, grad: Tensor, first: int, begin: int) -> None:
    """Bring gradients of what `behind_prompt` joined back to where it came from."""
    total[:, :first].add_(grad[:, :first])
    total[:, begin : begin + grad.shape[1] - first].add_(grad[:, first:])


class DenseAttention(torch.autograd.Function):
    """softmax(q k' scale + mask) v for q [N, Q, D] and k, v [N, L, D]; the mask is added to the scores [N, Q, L] seen as [-1, *shape]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2))
        by_segment = scores.view(-1, *shape)
        torch.add(mask, by_segment, alpha=scale, out=by_segment)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, weights = ctx.saved_tensors
        grad_v = torch.bmm(weights.transpose(1, 2), grads[0])
        grad = torch.bmm(grads[0], v.transpose(1, 2))
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return torch.bmm(grad, k).mul_(ctx.scale), torch.bmm(grad.transpose(1, 2), q).mul_(ctx.scale), grad_v, None, None, None


class Reorder(torch.autograd.Function):
    """Take `index` along a dimension, with `inverse` to bring gradients back; places that are `padding` give none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, index: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
        ctx.dim, ctx.inverse, ctx.padding = dim, inverse, padding
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = grads[0].index_select(ctx.dim, ctx.inverse)
        if ctx.padding is not None:
            back[ctx.padding] = 0  # only the outputs have padding, along their first dimension
        return back, None, None, None, None
