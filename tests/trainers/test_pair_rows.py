"""Pairs within their limits: every truncation mode by hand, what is left out and why, masks, fingerprints, overlap."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.config.schema import PairsConfig
from rlcli.data.prepare import open_or_prepare
from rlcli.data.store import Pair, PairSet
from rlcli.data.tokens import load_tokenizer
from rlcli.errors import UserError
from rlcli.trainers.pair_rows import Pairs, fit, refuse_overlap, training_row

DROP, PROMPT_END, ANSWER_START = "drop", "keep_prompt_end", "keep_answer_start"
Words = list[tuple[str, str, str]]  # prompt, chosen, rejected


def ids(length: int, first: int) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def pair(prompt: int, chosen: int, rejected: int) -> Pair:
    """Tokens 0.. of the prompt, 100.. of the chosen answer, 200.. of the rejected one, all of both answers trained on."""
    roles = [np.full(length, role, np.uint8) for length, role in ((prompt, 0), (chosen, 2), (rejected, 2))]
    return Pair(7, ids(prompt, 0), ids(chosen, 100), ids(rejected, 200), *roles)


def config(truncation: str = PROMPT_END, most: int = 10, prompt: int = 6, train_on: str = "last_answer") -> PairsConfig:
    return PairsConfig(train="", max_tokens=most, max_prompt_tokens=prompt, truncation=truncation, train_on=train_on)


@pytest.mark.parametrize("truncation", [DROP, PROMPT_END, ANSWER_START])
def test_a_pair_that_just_fits_is_kept_whole(truncation: str) -> None:
    """6 + 4 = 10 tokens, the longer answer counted."""
    for chosen, rejected in ((4, 2), (1, 4)):
        fitted = fit(pair(6, chosen, rejected), config(truncation))
        assert isinstance(fitted, Pair)
        assert (len(fitted.prompt), len(fitted.chosen), len(fitted.rejected)) == (6, chosen, rejected)


@pytest.mark.parametrize(
    ("truncation", "lengths", "expected"),
    [
        (DROP, (6, 5, 1), "too_long"),
        (DROP, (7, 1, 1), "too_long"),
        (PROMPT_END, (6, 5, 1), ((0, 6), (100, 4), (200, 1))),  # answers lose their end
        (PROMPT_END, (9, 5, 3), ((3, 6), (100, 4), (200, 3))),  # the prompt its first three tokens, then the answer its last one
        (PROMPT_END, (9, 2, 3), ((3, 6), (100, 2), (200, 3))),  # with the prompt cut to 6 the answers fit
        (ANSWER_START, (6, 5, 9), ((0, 6), (100, 4), (200, 4))),
        (ANSWER_START, (3, 9, 5), ((0, 3), (100, 7), (200, 5))),  # a short prompt leaves more to the answers
        (ANSWER_START, (7, 2, 2), "too_long"),  # the prompt is never cut
    ],
)
def test_truncation_by_hand(truncation: str, lengths: tuple[int, int, int], expected: object) -> None:
    """Expected: why it is left out, or (first token, length) of prompt, chosen and rejected."""
    fitted = fit(pair(*lengths), config(truncation))
    if isinstance(fitted, Pair):
        parts = (fitted.prompt, fitted.chosen, fitted.rejected)
        assert tuple((int(part[0]), len(part)) for part in parts) == expected
        assert [len(roles) for roles in (fitted.prompt_roles, fitted.chosen_roles, fitted.rejected_roles)] == [len(part) for part in parts]
        assert all(np.array_equal(part, ids(len(part), int(part[0]))) for part in parts)
    else:
        assert fitted == expected


@given(
    st.tuples(*[st.integers(0, 14)] * 3),
    st.sampled_from([DROP, PROMPT_END, ANSWER_START]),
    st.integers(2, 12),
    st.integers(1, 12),
)
def test_what_is_kept_is_within_the_limits_and_never_empty(lengths: tuple[int, int, int], truncation: str, most: int, prompt: int) -> None:
    fitted = fit(pair(*lengths), config(truncation, most, prompt))
    if isinstance(fitted, Pair):
        assert 1 <= len(fitted.prompt) <= prompt
        assert min(len(fitted.chosen), len(fitted.rejected)) >= 1
        assert len(fitted.prompt) + max(len(fitted.chosen), len(fitted.rejected)) <= most
        assert fitted.prompt[-1] == lengths[0] - 1  # a prompt always keeps its end
        assert (fitted.chosen[0], fitted.rejected[0]) == (100, 200)  # an answer its start


def test_pairs_that_say_nothing_are_left_out() -> None:
    same = pair(3, 9, 9)
    same.rejected = np.concatenate([same.chosen[:7], ids(2, 50)])
    assert fit(same, config()) == "equal_after_truncation"  # they part at the eighth token, and seven are left
    same.rejected[6] = 1
    assert isinstance(fit(same, config()), Pair)
    assert fit(pair(3, 0, 2), config()) == "empty_answer"
    assert fit(pair(0, 2, 2), config()) == "empty_prompt"
    assert fit(pair(4, 2, 2), config(most=4, prompt=4)) == "no_room_for_answer"


def test_a_conversation_is_trained_on_its_last_answer_or_on_all() -> None:
    """Chosen: an earlier answer of two tokens, another's turn of one, the last answer of three."""
    talk = pair(2, 6, 3)
    talk.chosen_roles = np.array([1, 1, 0, 2, 2, 2], np.uint8)
    last = training_row(talk, config())
    assert [mask.tolist() for mask in last.fields["mask"]] == [[0, 0, 0, 1, 1, 1], [1, 1, 1]]
    assert not last.splittable
    every = training_row(talk, config(train_on="all_answers"))
    assert [mask.tolist() for mask in every.fields["mask"]] == [[1, 1, 0, 1, 1, 1], [1, 1, 1]]
    assert fit(talk, config(most=5)) == "no_trained_token"  # three tokens are left of the answer: its last turn is gone
    assert isinstance(fit(talk, config(most=5, train_on="all_answers")), Pair)


TALK = [("system", "S"), ("user", "one"), ("assistant", "eins"), ("user", "two")]
GOOD = [("assistant", "zwei"), ("user", "three"), ("assistant", "drei")]
BAD = [("assistant", "zwo"), ("user", "three"), ("assistant", "trois")]


def said(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("train_on", "chosen", "rejected"),
    [("last_answer", "drei<|im_end|>", "trois<|im_end|>"), ("all_answers", "zwei<|im_end|>drei<|im_end|>", "zwo<|im_end|>trois<|im_end|>")],
)
@pytest.mark.parametrize("whole", [False, True])  # the prompt apart, or at the beginning of both conversations
def test_a_conversation_of_many_turns_with_a_system_message(
    tiny_tokenizer_folder: Path, tmp_path: Path, train_on: str, chosen: str, rejected: str, whole: bool
) -> None:
    """From a file to what is trained on. What chosen and rejected share is the prompt, and never trained on."""
    row = {"chosen": said(TALK + GOOD), "rejected": said(TALK + BAD)} if whole else {"prompt": said(TALK), "chosen": said(GOOD), "rejected": said(BAD)}
    (tmp_path / "talk.jsonl").write_text(json.dumps(row) + "\n")
    source = open_or_prepare(str(tmp_path / "talk.jsonl"), "pairs", str(tiny_tokenizer_folder), 0, None, None, tmp_path / "cache")
    assert isinstance(source, PairSet)
    (made,) = Pairs.of(source, PairsConfig(train="", max_tokens=300, max_prompt_tokens=200, train_on=train_on)).rows([0])
    decode = load_tokenizer(str(tiny_tokenizer_folder)).decode
    shared = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in TALK)
    assert decode(made.prompt).startswith(shared + "<|im_start|>assistant\n")
    covered = [decode(answer[mask > 0]) for answer, mask in zip(made.responses, made.fields["mask"], strict=True)]
    assert covered == [chosen, rejected]


@pytest.fixture
def opened(tiny_tokenizer_folder: Path, tmp_path: Path) -> Callable[[str, Words], PairSet]:
    """Pairs of texts as a prepared data set."""

    def make(name: str, words: Words) -> PairSet:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "chosen": c, "rejected": r}) + "\n" for p, c, r in words))
        found = open_or_prepare(str(file), "pairs", str(tiny_tokenizer_folder), 0, None, None, tmp_path / "cache")
        assert isinstance(found, PairSet)
        return found

    return make


WORDS: Words = [("one", "good", "bad"), ("two", "fine indeed", "poor"), ("three", "x" * 60 + "a", "x" * 60 + "b"), ("four", "yes", "no" * 30)]


def test_a_data_set_is_counted(opened: Callable[[str, Words], PairSet]) -> None:
    """A byte is a token here. The template adds to a prompt `<|im_start|>user\\n`, `<|im_end|>\\n<|im_start|>assistant\\n`."""
    source = opened("train", [*WORDS, ("five", "same", "same"), ("six", "same ", " same"), WORDS[0]])
    prompt = len(source.pair(0).prompt) + 2  # of "three"
    pairs = Pairs.of(source, PairsConfig(train="", max_tokens=prompt + 20, max_prompt_tokens=prompt))
    assert pairs.numbers == [0, 1, 3]
    assert dict(pairs.left_out) == {"equal_after_truncation": 1, "chosen equal to rejected (when prepared)": 2, "repeat an earlier row exactly (when prepared)": 1}
    assert pairs.cut == {3}
    assert pairs.share_cut([0, 1, 2]) == pytest.approx(1 / 3)
    assert pairs.share_cut([0, 1]) == 0
    assert max(row.tokens(shared=False) for row in pairs.rows(range(3))) <= 2 * (prompt + 20)


def test_no_usable_pair_is_an_error(opened: Callable[[str, Words], PairSet]) -> None:
    with pytest.raises(UserError, match=r"made of .*train.jsonl\): none of its 4 pairs can be trained on \(4 too_long\): raise data.max_tokens"):
        Pairs.of(opened("train", WORDS), PairsConfig(train="", max_tokens=10, max_prompt_tokens=8, truncation=DROP))


def test_the_fingerprint_stands_for_what_is_trained_on(opened: Callable[[str, Words], PairSet]) -> None:
    source = opened("train", WORDS)
    whole = Pairs.of(source, PairsConfig(train="", max_tokens=500, max_prompt_tokens=400))
    assert Pairs.of(source, PairsConfig(train="", max_tokens=600, max_prompt_tokens=300)).fingerprint == whole.fingerprint  # nothing is cut either way
    assert Pairs.of(source, PairsConfig(train="", max_tokens=60, max_prompt_tokens=50)).fingerprint != whole.fingerprint
    assert Pairs.of(opened("other", WORDS[:3]), PairsConfig(train="", max_tokens=500, max_prompt_tokens=400)).fingerprint != whole.fingerprint


def test_held_out_pairs_that_are_trained_on_are_refused(opened: Callable[[str, Words], PairSet]) -> None:
    settings = PairsConfig(train="", max_tokens=500, max_prompt_tokens=400)
    train = Pairs.of(opened("train", WORDS), settings)
    refuse_overlap(train, Pairs.of(opened("apart", [("one", "good", "worse"), ("five", "a", "b")]), settings))
    with pytest.raises(UserError, match=r"data\.eval=.*: 2 of its 3 pairs are in the training pairs too; take them out: msrl data prep"):
        refuse_overlap(train, Pairs.of(opened("held-out", [("five", "a", "b"), *WORDS[:2]]), settings))
