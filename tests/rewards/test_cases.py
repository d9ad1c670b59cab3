"""The table of answers, and the scores that go with the verdicts."""

from __future__ import annotations

import pytest
from cases import CASES, RESPONSES

from rlcli.rewards.answers import boxed, dapo
from rlcli.rewards.locate import find_answer
from rlcli.rewards.symbolic import math
from rlcli.types import Verdict


def sign(verdict: Verdict) -> str:
    return "+" if verdict.correct else "-"


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}: {case[1]} | {case[2]}" for case in CASES])
def test_answer(case: tuple[str, ...]) -> None:
    _, truth, answer, expected = case[:4]
    verdicts = [dapo(f"Answer: {answer}", truth, {}), boxed(f"\\boxed{{{answer}}}", truth, {}), math(f"\\boxed{{{answer}}}", truth, {})]
    assert "".join(map(sign, verdicts)) == expected[1:]
    assert [verdict.score for verdict in verdicts] == [
        1.0 if expected[1] == "+" else -1.0,
        1.0 if expected[2] == "+" else 0.0,
        1.0 if expected[3] == "+" else 0.0,
    ]


@pytest.mark.parametrize("response", RESPONSES, ids=[f"{response[0]}: {response[2][:40]}" for response in RESPONSES])
def test_response(response: tuple[str, str, str, str, str | None, str | None]) -> None:
    _, truth, text, expected, in_box, found = response
    verdicts = [dapo(text, truth, {}), boxed(text, truth, {}), math(text, truth, {})]
    assert "".join(map(sign, verdicts)) == expected
    assert verdicts[1].answer == in_box
    assert find_answer(text, truth) == found


def test_the_table_is_large_and_misjudgements_are_explained() -> None:
    assert len(CASES) >= 120
    assert len({case[1:3] for case in CASES}) == len(CASES)
    for case in CASES:
        right, _, by_box, by_algebra = case[3]
        assert (by_box == by_algebra == right) == (len(case) == 4), case
    wrong = [case for case in CASES if case[3][0] == "-"]
    assert len(wrong) >= 50
    assert all(case[3][2:] == "--" for case in wrong), "boxed and math take no wrong answer of the table for right"
