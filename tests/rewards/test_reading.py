"""The parts that answers are read with: boxes, numbers, units, forms, the paper's normalisation."""

# ruff: noqa: RUF001
from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.rewards import minerva
from rlcli.rewards.clean import clean
from rlcli.rewards.extract import boxes, last_answer_line
from rlcli.rewards.locate import find_answer
from rlcli.rewards.numbers import read_number
from rlcli.rewards.plain import Many, Named, Number, Text, read, same_answer
from rlcli.rewards.symbolic import differ, math, nesting, parse, roots
from rlcli.rewards.units import read_unit, same_quantity


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{2}", [(0, 9, "1"), (14, 23, "2")]),
        (r"\boxed{a{b}c}", [(0, 13, "a{b}c")]),
        (r"\boxed{\fbox{1}} ", [(0, 16, r"\fbox{1}")]),
        (r"\boxed{\}}", [(0, 10, r"\}")]),
        (r"}} \boxed{1}", [(3, 12, "1")]),
        (r"\boxed{ \boxed{2}", [(8, 17, "2")]),
        (r"\boxedx{1} \\boxed{1}", [(12, 21, "1")]),
        ("\\boxed\n{7}", [(0, 10, "7")]),
        (r"\boxed", []),
    ],
)
def test_boxes(text: str, found: list[tuple[int, int, str]]) -> None:
    assert boxes(text) == found


@settings(deadline=None)
@given(st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\", " ", "1", "\n", "$"]), max_size=40).map("".join))
def test_boxes_are_balanced_and_apart(text: str) -> None:
    end = 0
    for start, stop, content in boxes(text):
        assert end <= start < stop
        assert content in text[start:stop]
        end = stop


def test_the_answer_line_is_the_last_of_the_last_300_characters() -> None:
    assert last_answer_line("Answer: 1\nANSWER :  2 \nthat is all") == "2 "
    assert last_answer_line("Answer: 1" + "x" * 291) == "1" + "x" * 291  # 300 in all
    assert last_answer_line("Answer: 1" + "x" * 292) is None


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 5", "5"),
        ("banana split", "banansplit"),  # "a " goes wherever it stands: the rule is blunt
        ("5 square units", "5"),
        (r"$\frac12$", r"\frac{1}{2}"),
        (r"\text{cm}", ""),
        (r"12\text{ cm}^2", "12"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\$1,234", "1234"),
        ("1,234.5", "1,234.5"),
        (r"90^\circ", "90"),
        (r"the $5$ of $6$", "5"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\boxed{7}", "7"),
        (r"1{,}000", "1000"),
        (r"3,\text{and}5", "35"),  # the commas go, since what is left are digits
    ],
)
def test_minerva(answer: str, normal: str) -> None:
    assert minerva.normalise(answer) == normal


@pytest.mark.parametrize(
    ("text", "value", "rest"),
    [
        ("5", Fraction(5), ""),
        ("-5.50 cm", Fraction(-11, 2), " cm"),
        (".5", Fraction(1, 2), ""),
        ("3/4", Fraction(3, 4), ""),
        (r"\frac{-1}{2}", Fraction(-1, 2), ""),
        (r"-\frac{1}{-2}", Fraction(1, 2), ""),
        (r"2\frac{1}{2}", Fraction(5, 2), ""),
        ("2 1/2", Fraction(5, 2), ""),
        (r"-1\frac{3}{4}", Fraction(-7, 4), ""),
        (r"1.5\times 10^{3}", Fraction(1500), ""),
        ("1.5e-3", Fraction(3, 2000), ""),
        ("10^{-2}", Fraction(1, 100), ""),
        ("5x", Fraction(5), "x"),
    ],
)
def test_numbers(text: str, value: Fraction, rest: str) -> None:
    assert read_number(text) == (value, rest)


@pytest.mark.parametrize("text", ["", "x", "1/0", r"\frac{1}{0}", "10^{999}", "1e9999", "2^{10}", "52_8", "5!", "1/2/3", "9" * 400])
def test_what_is_no_number_that_can_be_meant(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("rest", "unit"),
    [
        ("", ""),
        (" cm", "cm"),
        ("cm", "cm"),
        (" centimeters", "cm"),
        (" cm^2", "cm^2"),
        (" square cm", "cm^2"),
        (" cubic feet", "ft^3"),
        ("°", "°"),
        ("%", "%"),
        (" m", "m"),
        ("m", None),
        ("x", None),
        (" sin x", None),
        (" red apples", "red apples"),
        ("元", "¥"),
        (" units", ""),
    ],
)
def test_units(rest: str, unit: str | None) -> None:
    assert read_unit(rest) == unit


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ((50, "%"), (50, ""), True),
        ((50, "%"), (Fraction(1, 2), ""), True),
        ((50, ""), (Fraction(1, 2), ""), False),
        ((50, "%"), (50, "cm"), False),
        ((5, "cm"), (5, "m"), False),
        ((5, "cm"), (5, "apples"), True),
        ((5, "cm"), (6, ""), False),
    ],
)
def test_quantities(left: tuple[Fraction, str], right: tuple[Fraction, str], same: bool) -> None:
    assert same_quantity(left, right) is same
    assert same_quantity(right, left) is same


def test_forms() -> None:
    one, two = Number(Fraction(1), ""), Number(Fraction(2), "")
    assert read("(1, 2]") == Many("(]", (one, two))
    assert read(r"\{1, 2\}") == Many("set", (one, two))
    assert read("1 and 2") == Many("list", (one, two))
    assert read("x = 1") == Named("x", one)
    assert read("x = 3 = 1") == Named("x", one)
    assert read("(x+1)(x+2)") == Text("(x+1)(x+2)")
    assert read(r"\pm 1") == Many("list", (one, Number(Fraction(-1), "")))
    assert read(clean(r"\begin{pmatrix} 1 & 2 \\ 2 & 1 \end{pmatrix}")) == Many("matrix", (Many("row", (one, two)), Many("row", (two, one))))


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("019.,()[]{}\\^_+-*/=%$ xyeπ½，。&<>"), max_size=30))
def test_an_answer_equals_itself_whatever_it_is(text: str) -> None:
    assert same_answer(text, text) == bool(clean(text))


def as_written(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


@settings(deadline=None)
@given(st.fractions(max_denominator=50), st.fractions(max_denominator=50))
def test_fractions_are_the_same_exactly_where_their_values_are(left: Fraction, right: Fraction) -> None:
    tex = f"{'-' if right < 0 else ''}\\frac{{{abs(right.numerator) * 3}}}{{{right.denominator * 3}}}"
    assert same_answer(as_written(left), tex) == (left == right)


def test_very_long_answers_are_compared_as_they_are() -> None:
    assert same_answer("x" * 5000, "x" * 5000 + " ")
    assert not same_answer("x" * 5000, "x" * 5001)


def test_roots_keep_their_own_bracket() -> None:
    assert roots("2*sqrt((1+x)/3)+1") == r"2*\sqrt{(1+x)/3}+1"
    assert roots(r"\sqrt(2)") == r"\sqrt{2}"
    assert roots("sqrt(sqrt(2))") == r"\sqrt{\sqrt{2}}"


def test_numbers_too_large_to_be_meant_are_not_computed() -> None:
    for text in (r"10^{10^{10}}", "(10^9)!", r"\binom{10^9}{10^8}", "9^{9^{9}}", "2^{2^{2^{2^{2}}}}", "1" + "+1^{9}" * 3 + "+7^{10^{8}}"):
        assert parse(text, False) is None
    assert parse("2^{100}", False).doit() == 2**100


def test_expressions_that_differ_at_a_point_are_not_searched_for_a_proof() -> None:
    def at_a_point(left: str, right: str) -> bool:
        return differ(parse(left, False), parse(right, False))

    assert at_a_point("x^2+1", "(x+1)^2")
    assert at_a_point(r"\sqrt{8}", r"2\sqrt{3}")
    assert at_a_point("x", "x+1") is False  # a name may stand for words: left to the library
    for left, right in [("x^2+2x+1", "(x+1)^2"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sin^2 x + \cos^2 x", "1"), ("0.333333", r"\frac{1}{3}")]:
        assert at_a_point(left, right) is False
    assert at_a_point("x=1", "x=2") is False  # no expressions
    assert at_a_point(r"\sum_{n=1}^{5} n", "16") is False  # slow to evaluate


def test_matrices_within_products_do_no_harm() -> None:
    column = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    assert math(f"\\boxed{{2{column}}}", r"\begin{pmatrix} 2 \\ 4 \end{pmatrix}", {}).reason in ("wrong", "unparsed")


def test_deep_nesting_is_not_parsed() -> None:
    assert nesting("((1)(2))") == 2
    assert parse("(" * 17 + "1" + ")" * 17, False) is None
    assert parse("(" * 9 + "1" + ")" * 9, False) == 1


def test_boxes_belong_together_only_where_the_truth_is_a_list() -> None:
    text = r"\boxed{3} and \boxed{5}"
    assert find_answer(text, "3, 5") == "3, 5"
    assert find_answer(text, "5") == "5"
    assert find_answer(text, "3,500") == "5"
    assert find_answer("no box: 5", "5", boxed_only=True) is None
