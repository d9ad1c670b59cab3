"""Evaluation measures, by hand and by enumeration."""

from itertools import combinations

import numpy as np
import pytest

from rlcli.algorithms.evaluation import evaluate, majority, pass_at_k
from rlcli.types import Group, Prompt, Sample, Verdict


def verdict(answer, correct, reason=None):
    return Verdict(1.0 if correct else -1.0, correct, answer, reason or ("correct" if correct else "wrong"))


def group(verdicts, lengths, cut=()):
    samples = [
        Sample(np.zeros(n, np.int32), np.zeros(n, np.float32), "length" if i in cut else "stop", 0) for i, n in enumerate(lengths)
    ]
    return Group(Prompt(0, np.zeros(3, np.int32), "7"), samples, verdicts)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (6, 5), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c):
    flags = [i < c for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(combinations(flags, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="at least"):
        pass_at_k(n, c, n + 1)


def test_majority():
    assert majority([verdict("8", False), verdict("7", True), verdict(" 7 ", True)])
    assert not majority([verdict("8", False), verdict("7", True)])  # a tie goes to the first seen
    assert majority([verdict("7", True), verdict("8", False)])
    assert majority([verdict(None, False), verdict(None, False), verdict("7", True)])  # no answer has no vote
    assert not majority([verdict(None, False)])


def test_evaluate_by_hand():
    one = group([verdict("7", True), verdict("8", False), verdict("7", True), verdict(None, False, "timeout")], [2, 4, 6, 8], cut=(3,))
    two = group([verdict("1", False), verdict("2", False), verdict("7", True), verdict("1", False)], [1, 1, 1, 1])
    out = evaluate([one, two])
    assert out == pytest.approx({
        "accuracy": 3 / 8, "avg@4": 3 / 8, "pass@1": 3 / 8, "pass@4": 1.0, "maj@4": 0.5,
        "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # pairs without a right one: 1 of 6, and 3 of 6
        "reward": (2 - 2 + 1 - 3) / 8, "response_tokens": 3.0, "truncated": 1 / 8, "no_answer": 1 / 8, "unjudged": 1 / 8,
        "prompts": 2.0, "samples": 8.0,
    })  # fmt: skip


def test_evaluate_edges():
    assert evaluate([]) == {}
    with pytest.raises(ValueError, match="2 samples"):
        evaluate([group([verdict("7", True)] * 2, [1, 1]), group([verdict("7", True)], [1])])
