"""Cleaning: what counts as a repetition, a conflict, an overlap, and who goes to validation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.clean import Duplicates, HeldOut, in_validation, ngrams, question, words
from rlcli.data.rows import Row


def row(prompt: str, answer: str = "1", number: int = 1, rejected: str | None = None) -> Row:
    messages = [{"role": "user", "content": prompt}]
    if rejected is None:
        return Row(messages, answer, number=number)
    return Row(messages, chosen=[{"role": "assistant", "content": answer}], rejected=[{"role": "assistant", "content": rejected}], number=number)


def test_repetitions_and_conflicts() -> None:
    seen = Duplicates("prompts")
    given_rows = [("a b", "1"), ("a b", "1"), ("a  b\n", "1"), ("a b", "2"), (" a b", "2"), ("A b", "1"), ("ab", "1"), ("a b", " 1")]
    steps = [seen.see(row(prompt, answer, number)) for number, (prompt, answer) in enumerate(given_rows, start=1)]
    assert steps == [None, "exact_duplicate", "near_duplicate", None, "near_duplicate", None, None, "near_duplicate"]
    assert list(seen.conflicts.values()) == [[(0, 1), (0, 4)]]
    assert seen.prompts == 5  # "a b", "a  b\n", " a b", "A b", "ab"
    assert seen.normal_prompts == 3


def test_roles_and_borders_are_part_of_a_prompt() -> None:
    seen = Duplicates("prompts")
    one = Row([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "1")
    other = Row([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "1")
    assert [seen.see(one), seen.see(other), seen.see(row("x y", "1"))] == [None, None, None]


def test_pairs_with_the_same_prompt_are_no_conflict() -> None:
    seen = Duplicates("pairs")
    assert seen.see(row("q", "a", 1, "b")) is None
    assert seen.see(row("q", "b", 2, "a")) is None
    assert seen.see(row("q", "a", 3, "b")) == "exact_duplicate"
    assert not seen.conflicts


QUESTION = "A farmer has 17 sheep and buys 5 more every week; after how many weeks will there be 102 sheep on the farm?"


def test_held_out_questions_are_found() -> None:
    other = "Find the sum of all integer bases b greater than nine for which 17 in base b is a divisor of 97 in base b."
    held = HeldOut.of([QUESTION, other], n=8, share=0.5)
    assert len(held) == 2
    assert held.find(QUESTION) == "excluded_exact"
    assert held.find(QUESTION.upper().replace(" ", "\n")) == "excluded_exact"  # case and whitespace aside
    assert held.find(f"Solve this step by step. {QUESTION} Give the number alone, please, and nothing else.") == "excluded_near"
    assert held.find(" ".join(QUESTION.split()[:16])) == "excluded_near"  # its beginning, 16 of 22 words
    assert held.find("A farmer has 17 sheep and sells them all on Monday; how much money does the farmer have in the end?") is None
    assert held.find("What is 2 + 2?") is None
    assert held.find("") is None


def test_an_instruction_around_all_held_out_questions_is_no_overlap() -> None:
    frame = "Please reason step by step, and put your final answer within a box at the very end of it: "
    held = HeldOut.of([frame + QUESTION, frame + "How many primes are there below one hundred and twenty seven, not counting the number two?", frame + "What is the area of a circle whose radius is the square root of eleven divided by pi?"], n=8, share=0.5)
    assert held.find(frame + "What do you call a cow on the moon at night when nobody can see it?") is None
    assert held.find(QUESTION) == "excluded_near"


def test_words_and_ngrams() -> None:
    assert words("It's $x_1 = \\frac{1}{2}$") == ["it", "'", "s", "$", "x", "_", "1", "=", "\\", "frac", "{", "1", "}", "{", "2", "}", "$"]
    assert len(ngrams(["a", "b", "a", "b", "a"], 2)) == 2
    assert ngrams(["a"], 2) == set()


def test_the_question_is_the_last_user_turn() -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}, {"role": "tool", "content": "four"}]
    assert question(Row(talk)) == "three"
    assert question(Row([])) == ""


@given(st.lists(st.text(max_size=6), min_size=1, max_size=10), st.floats(0, 0.9), st.integers(0, 3))
def test_validation_goes_by_the_prompt_alone(prompts: list[str], share: float, seed: int) -> None:
    for prompt in prompts:
        side = in_validation(row(prompt, "1"), share, seed)
        assert side == in_validation(row(f" {prompt}  ", "2"), share, seed)
        assert not in_validation(row(prompt), 0.0, seed)


def test_validation_takes_about_its_share() -> None:
    taken = sum(in_validation(row(f"prompt {i}"), 0.2, 1) for i in range(4000))
    assert 700 < taken < 900  # 800 expected, standard deviation 25
