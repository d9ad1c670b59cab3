"""Verifiers of form, the predecessor's, and the overlong penalty."""

from __future__ import annotations

import math

import pytest

from rlcli.rewards.form import format_, length, regex
from rlcli.rewards.predecessor import acc, base_acc, boxed_math, retool_reward, step, strict_format
from rlcli.rewards.shaping import overlong_penalty

GOOD = "<think>two and three</think>\n<answer>5</answer>"


@pytest.mark.parametrize(
    ("text", "loose", "strict", "predecessors"),
    [
        (GOOD, 1.0, 1.0, 1.0),
        (f"Well. {GOOD} Done.", 1.0, 0.0, -0.5),
        ("<think>a</think> so <answer>5</answer>", 1.0, 0.0, 1.0),
        ("<think></think><answer>5</answer>", 1.0, 0.0, 1.0),
        (f"{GOOD}<answer>6</answer>", 1.0, 0.0, -0.5),
        ("<answer>5</answer><think>a</think>", 0.0, 0.0, -0.5),
        ("<think>a<answer>5</answer>", 0.0, 0.0, -0.5),
        ("<think>a</think>5", 0.0, 0.0, -0.5),
        ("two and three</think><answer>5</answer>", 0.0, 0.0, -0.5),
        ("5", 0.0, 0.0, -0.5),
        ("", 0.0, 0.0, -0.5),
    ],
)
def test_tags(text: str, loose: float, strict: float, predecessors: float) -> None:
    assert format_(text, "5", {}).score == loose
    assert format_(text, "5", {}, strict=True).score == strict
    assert strict_format(text, "5", {}).score == predecessors


def test_tags_where_the_prompt_has_opened_the_first() -> None:
    text = "two and three</think><answer>5</answer>"
    assert format_(text, "5", {}, strict=True, opened=True).score == 1.0
    assert format_(text, "5", {}, opened=True).answer == "5"


@pytest.mark.parametrize(("size", "score"), [(0, 0.0), (4, 0.0), (5, 1.0), (10, 1.0), (11, 0.75), (13, 0.25), (14, 0.0), (100, 0.0)])
def test_length(size: int, score: float) -> None:
    assert length("x" * size, "", {}, least=5, most=10, taper=4).score == score
    assert length("x " * size, "", {}, least=5, most=10, taper=4, unit="words").score == score
    assert length("x\n" * size, "", {}, least=5, most=10, taper=4, unit="lines").score == score
    assert length("x" * size, "", {}, least=5, most=10).score == (1.0 if 5 <= size <= 10 else 0.0)


def test_regex() -> None:
    assert regex("a 12 b 34", "34", {}, pattern=r"(\d+)").correct  # the last match's group
    assert not regex("a 12 b 34", "12", {}, pattern=r"(\d+)").correct
    assert regex("a 12", "anything", {}, pattern=r"\d").correct  # no group: found is right
    assert regex("a", "x", {}, pattern=r"\d").reason == "no_answer"
    assert regex("a 12", r"^a (\d+)$", {}).correct  # the row's own pattern
    assert regex("a", "", {}).reason == "unparsed"


@pytest.mark.parametrize(
    ("text", "by_acc", "by_box", "by_base"),
    [
        (r"<think>a</think><answer>\boxed{0.5}</answer>", 1.0, 1.0, 1.0),
        (r"<think>a</think><answer>\boxed{0.6}</answer>", -0.5, 0.0, 0.0),
        (r"\boxed{0.5}", 1.0, 1.0, 0.0),
        (r"<think>\boxed{0.5}</think><answer>0.5</answer>", 1.0, 1.0, 0.0),
        ("0.5", -1.0, 0.0, 0.0),
    ],
)
def test_the_predecessors_scores(text: str, by_acc: float, by_box: float, by_base: float) -> None:
    truth = r"\frac{1}{2}"
    assert acc(text, truth, {}).score == by_acc
    assert boxed_math(text, truth, {}).score == by_box
    assert base_acc(text, truth, {}).score == by_base


def test_steps_count_a_third_each() -> None:
    assert step("Step 1: a\nStep 2: b", "", {}).score == pytest.approx(2 / 3)
    assert step("First, a. Next, b. Finally, c.\n- d", "", {}).score == 1.0
    assert step("none", "", {}).score == 0.0


def test_retool_pays_for_tool_calls_of_wrong_answers_only() -> None:
    call = "<tool_call>x</tool_call>"
    assert retool_reward(call + r"\boxed{5}", "5", {}).score == 1.0
    assert retool_reward(call * 3 + r"\boxed{6}", "5", {}).score == pytest.approx(-0.7)
    assert retool_reward(call * 20 + r"\boxed{6}", "5", {}).score == 0.0
    assert retool_reward(r"\boxed{5}" + "x" * 100, "5", {}).score == -1.0  # beyond the last 100 characters
    assert retool_reward(r"\boxed{5.0}", "5", {}).score == -1.0  # to the letter


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)]
)
def test_overlong_penalty(tokens: int, penalty: float) -> None:
    """DAPO Eq. 13 with L_max = 100 and a cache of 20: ((100 - 20) - |y|) / 20 between."""
    assert math.isclose(overlong_penalty(tokens, 100, 20), penalty)


def test_overlong_penalty_without_a_buffer_and_with_one_too_long() -> None:
    assert overlong_penalty(10_000, 100, 0) == 0.0
    with pytest.raises(ValueError, match="must be shorter"):
        overlong_penalty(5, 100, 100)
