"""Names, options, weights, and what becomes of several verdicts."""

# ruff: noqa: RUF001
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.errors import UserError
from rlcli.rewards.verdicts import REASONS, count_reasons
from rlcli.rewards.verifiers import BUILT_IN, check_names, find, options_of, resolve
from rlcli.types import Verdict


def test_every_name_resolves_and_is_documented() -> None:
    for name in BUILT_IN:
        assert resolve([name]).parts[0].name == name
        assert find(name).__doc__


def test_the_predecessors_ten_are_all_here() -> None:
    ten = "acc acc_for_dapo math_17k_acc acc_for_ppo base_acc math_verify_reward strict_format format step retool_reward"
    assert set(ten.split()) <= set(BUILT_IN)


def test_scores_are_summed_by_weight_and_the_first_judge_decides() -> None:
    combined = resolve(["format", "dapo", "boxed"], [0.5, 1.0, 2.0])
    verdict = combined("<think>a</think><answer>\\boxed{5}</answer>\nAnswer: 6", "5", {})
    assert verdict == Verdict(0.5 * 1 + 1.0 * -1 + 2.0 * 1, False, "6", "wrong")  # dapo is the first that judges the answer
    assert combined.wrong_score == -1.0  # 0.5 * 0 + 1 * -1 + 2 * 0


def test_without_a_judge_the_first_decides() -> None:
    assert resolve(["length", "format"])("no tags", "", {}) == Verdict(1.0, True, "7 characters", "correct")


def test_options_are_read_as_their_types() -> None:
    assert options_of(find("length")) == {"least": 1, "most": 4000, "taper": 0, "unit": "characters"}
    combined = resolve(["length", "format"], options=["length.most=3", "length.unit=words", "format.strict=true"])
    assert combined("a b c", "", {}).score == 1.0
    assert combined("a b c d", "", {}).score == 0.0
    assert resolve(["naughty:as_number"], options=["naughty:as_number.factor=2.5"])("xx", "", {}) == Verdict(5.0, True, None, "correct")
    assert resolve(["regex"], options=[r"regex.pattern=x=(\d+)"])("x=5", "5", {}).correct  # only the first = parts


def test_a_number_alone_is_a_score() -> None:
    assert resolve(["naughty:as_number"])("", "", {}) == Verdict(0.0, False, None, "wrong")


@pytest.mark.parametrize("name", ["Dapo", "dapoo", "", "math verify"])
def test_unknown_names_are_errors(name: str) -> None:
    with pytest.raises(UserError, match="unknown verifier"):
        check_names([name], [1.0])


def test_every_reason_is_counted() -> None:
    verdicts = [Verdict(0.0, False, None, reason) for reason in ("wrong", "timeout", "wrong")]
    assert count_reasons(verdicts) == {"correct": 0, "wrong": 2, "no_answer": 0, "unparsed": 0, "timeout": 1, "crashed": 0}
    assert tuple(count_reasons([])) == REASONS


PIECES = ["\\boxed{", "}", "{", "Answer: ", "<answer>", "</answer>", "<think>", "</think>", "\\frac", "\\sqrt", "$", "\\text{", "1", "x", "^", "_",
          "(", ")", "[", "]", ",", "\\pm", "\\cup", "=", "\n", "\\begin{pmatrix}", "&", "\\\\", "%", "-", "\x00", "\ud800", "，"]  # fmt: skip
CHEAP = [name for name, target in BUILT_IN.items() if not target.startswith(("rlcli.rewards.symbolic", "rlcli.rewards.predecessor"))]
CHEAP = [*(name for name in CHEAP if name != "regex"), "strict_format", "step", "retool_reward"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)), st.sampled_from(["5", "\\frac{1}{2}", "(1,2)", "x+1", ""]))
@settings(deadline=None)
def test_any_text_ends_in_a_verdict(text: str, truth: str) -> None:
    for name in CHEAP:
        assert resolve([name])(text, truth, {}).reason in REASONS


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(deadline=None, max_examples=40)
def test_any_text_ends_in_a_verdict_by_algebra(text: str) -> None:
    assert resolve(["math"])(f"\\boxed{{{text}}}", "\\frac{1}{2}x", {}).reason in REASONS
