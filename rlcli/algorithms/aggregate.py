"""How the losses of tokens add up to the loss of a mini-batch.

Every rule is a weight for each token, computed once from the lengths of the whole global mini-batch. The loss is then the plain sum of
weight x token loss, so neither the cut into micro-batches nor the spread over devices can change it.
"""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("token_mean", "prompt_mean", "seq_mean", "seq_sum")


def token_weights(kind: str, lengths_per_group: Sequence[Sequence[int]], max_response_tokens: int) -> list[list[float]]:
    """The weight that each trainable token of a sample gets, shaped like `lengths_per_group`.

    lengths_per_group: trainable tokens of every sample of the mini-batch, by group; 0 where a sample is masked.

    token_mean: 1 / all tokens (DAPO Eq. 8, over the mini-batch as in its code).
    prompt_mean: token mean within a group, then mean over groups (DAPO Eq. 8 as printed).
    seq_mean: token mean within a sample, then mean over samples (GRPO).
    seq_sum: sum within a sample, divided by samples x `max_response_tokens` (Dr.GRPO, arXiv 2503.20783).

    What is masked counts neither above nor below the fraction line: groups and samples without a trainable token are left out of the
    means. The weights of all tokens of a mean sum to 1; without any trainable token all weights are 0.
    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown aggregation {kind!r}; one of {', '.join(KINDS)}")
    group_tokens = [sum(lengths) for lengths in lengths_per_group]
    tokens = sum(group_tokens)
    groups = sum(count > 0 for count in group_tokens)
    samples = sum(length > 0 for lengths in lengths_per_group for length in lengths)

    def weight(length: int, in_group: int) -> float:
        if length == 0:
            return 0.0
        if kind == "token_mean":
            return 1.0 / tokens
        if kind == "prompt_mean":
            return 1.0 / (groups * in_group)
        if kind == "seq_mean":
            return 1.0 / (samples * length)
        return 1.0 / (samples * max_response_tokens)

    return [[weight(length, in_group) for length in lengths] for lengths, in_group in zip(lengths_per_group, group_tokens, strict=True)]
