"""Rewards that depend on length alone."""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """The soft penalty of DAPO, Eq. 13: 0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, -1 beyond.

    length: tokens of the response. buffer_tokens 0: no penalty at all. The caller multiplies by its factor and adds it to the
    score, after the dynamic filter has looked at the raw outcome. Errors: ValueError where the buffer is not shorter than max_tokens.
    """
    if not 0 <= buffer_tokens < max_tokens:
        raise ValueError(f"the overlong buffer ({buffer_tokens} tokens) must be shorter than the longest response ({max_tokens} tokens)")
    if buffer_tokens == 0:
        return 0.0
    excess = length - (max_tokens - buffer_tokens)
    return -min(max(excess / buffer_tokens, 0.0), 1.0)
