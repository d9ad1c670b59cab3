"""Our own comparison of short answers."""

from __future__ import annotations

from rlcli.rewards import minerva


def same_answer(answer: str, truth: str) -> bool:
    return minerva.normalise(answer) == minerva.normalise(truth)
