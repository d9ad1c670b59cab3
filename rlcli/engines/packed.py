"""A micro-batch as tensors: every token once, one after the other, with nothing padded.

A segment is a prompt and the responses that follow it: [prompt, response 1, ..., response G]. Each response sees the prompt
and itself, and its positions continue from the prompt's end, as if it stood alone behind the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlcli.data.pack import MicroBatch, Piece
from rlcli.types import TrainRow

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt of `prompt` tokens from `start` on, and the lengths of the responses behind it."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(slots=True)
class Packed:
    """T tokens computed, of which N response tokens are predicted.

    ids_T, positions_T: token ids and their positions within prompt and response.
    source_N: index of the token whose hidden state predicts each response token; targets_N: the response tokens.
    sample_N, row_S, fields: as in `rlcli.algorithms.base.Tokens`.
    """

    ids_T: Tensor
    positions_T: Tensor
    segments: list[Segment]
    source_N: Tensor
    targets_N: Tensor
    sample_N: Tensor
    row_S: Tensor
    fields: dict[str, Tensor]


def to_tensors(batch: MicroBatch) -> Packed:
    """Lay a micro-batch out as tensors; the responses keep the order of its rows."""
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    source: list[np.ndarray] = []
    segments: list[Segment] = []
    start = 0
    for piece, row in zip(batch.pieces, batch.rows, strict=True):
        for responses in [row.responses] if piece.shared else [[response] for response in row.responses]:
            segment = Segment(start, len(row.prompt), tuple(len(response) for response in responses))
            segments.append(segment)
            ids += [row.prompt, *responses]
            positions += [np.arange(segment.prompt), *(segment.prompt + np.arange(length) for length in segment.responses)]
            source += predictors(segment)
            start += segment.length
    samples = [response for row in batch.rows for response in row.responses]
    return Packed(
        ids_T=whole(ids),
        positions_T=whole(positions),
        segments=segments,
        source_N=whole(source),
        targets_N=whole(samples),
        sample_N=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(sample) for sample in samples], dtype=torch.int64)),
        row_S=row_of_samples(batch.pieces),
        fields=pack_fields(batch.rows),
    )


def predictors(segment: Segment) -> list[np.ndarray]:
    """Where each response token of a segment is predicted: the first at the prompt's last token, the others one place before themselves."""
    last = segment.start + segment.prompt - 1
    first = last + 1
    out = []
    for length in segment.responses:
        places = np.arange(first - 1, first - 1 + length)
        places[:1] = last
        out.append(places)
        first += length
    return out


def row_of_samples(pieces: list[Piece]) -> Tensor:
    """[S]: which piece of the micro-batch each sample belongs to."""
    counts = torch.tensor([len(piece.responses) for piece in pieces], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(pieces)), counts)


def pack_fields(rows: list[TrainRow]) -> dict[str, Tensor]:
    """The rows' fields by name, each [N] float32; all rows have the same ones."""
    names = rows[0].fields.keys() if rows else ()
    return {name: torch.from_numpy(np.concatenate([v for row in rows for v in row.fields[name]]).astype(np.float32)) for name in names}


def whole(arrays: list[np.ndarray]) -> Tensor:
    """All arrays one after the other, int64."""
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64)) if arrays else torch.zeros(0, dtype=torch.int64)
