"""Every shape of rows becomes the Row that it means; bad rows say column, expectation and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcli.data.convert import SHAPES, choose
from rlcli.data.rows import BadRow, Row
from rlcli.data.settings import PrepareSettings
from rlcli.errors import UserError

U, A, S = ({"role": role, "content": content} for role, content in (("user", "hi"), ("assistant", "yo"), ("system", "be brief")))
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
NO = {"role": "assistant", "content": "no"}
U2 = {"role": "user", "content": "and?"}


def convert(raw: dict[str, Any], **settings: Any) -> tuple[str, Row]:
    converter = choose(PrepareSettings(**settings), raw, Path("rows.jsonl"))
    return converter.shape, converter.convert(raw)


PROMPTS: list[tuple[str, dict[str, Any], list[dict[str, Any]], str]] = [
    ("verl", {"prompt": [U], "reward_model": {"ground_truth": "34", "style": "rule"}, "ability": "MATH"}, [U], "34"),
    ("verl", {"prompt": "hi", "reward_model": {"ground_truth": -7}}, [U], "-7"),
    ("slime", {"prompt": [U], "label": "34"}, [U], "34"),
    ("slime", {"prompt": "hi", "label": 34.0}, [U], "34"),
    ("messages", {"messages": [S, U, A]}, [S, U], "yo"),
    ("messages", {"messages": [U, A, U2], "answer": "7"}, [U, A, U2], "7"),
    ("messages", {"conversations": [HUMAN, GPT], "system": "be brief"}, [S, U], "yo"),
    ("alpaca", {"instruction": "hi", "input": "", "output": "yo"}, [U], "yo"),
    ("alpaca", {"instruction": "hi", "input": "you", "output": "yo", "system": "be brief", "history": [["a", "b"]]}, [S, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "hi\nyou"}], "yo"),
    ("plain", {"question": "hi", "answer": "yo"}, [U], "yo"),
    ("plain", {"problem": "hi", "solution": "long", "answer": "yo"}, [U], "yo"),
    ("plain", {"prompt": "hi", "answer": 204}, [U], "204"),
    ("plain", {"prompt": [S, U], "answer": None}, [S, U], ""),
]


@pytest.mark.parametrize(("shape", "raw", "prompt", "answer"), PROMPTS)
def test_prompts(shape: str, raw: dict[str, Any], prompt: list[dict[str, Any]], answer: str) -> None:
    found, row = convert(raw)
    assert found == shape
    assert row.prompt == prompt
    assert row.answer == answer
    assert not row.chosen


PAIRS: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("orca", {"system": "", "question": "hi", "chosen": "yo", "rejected": "no"}, [U], [A], [NO]),
    ("orca", {"system": "be brief", "question": "hi", "chosen": "yo", "rejected": "no"}, [S, U], [A], [NO]),
    ("ranking", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}, [U], [A], [NO]),
    ("ranking", {"conversations": [HUMAN, GPT, {"from": "human", "value": "and?"}], "chosen": GPT, "rejected": NO}, [U, A, U2], [A], [NO]),
    ("explicit", {"prompt": "hi", "chosen": "yo", "rejected": "no"}, [U], [A], [NO]),
    ("explicit", {"prompt": [S, U], "chosen": [A], "rejected": [NO]}, [S, U], [A], [NO]),
    ("explicit", {"prompt": [U], "chosen": [U, A], "rejected": [U, NO]}, [U], [A], [NO]),
    ("explicit", {"prompt": "hi", "chosen": [A, U2, A], "rejected": [NO]}, [U], [A, U2, A], [NO]),
    ("implicit", {"chosen": [U, A], "rejected": [U, NO]}, [U], [A], [NO]),
    ("implicit", {"chosen": [U, A, U2, A], "rejected": [U, A, U2, NO]}, [U, A, U2], [A], [NO]),
    ("implicit", {"chosen": [U, A, U2, A], "rejected": [U, NO, U2, NO]}, [U], [A, U2, A], [NO, U2, NO]),
    ("implicit", {"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "\n\nHuman: hi\n\nAssistant: no"}, [U], [A], [NO]),
    ("implicit", {"chosen": "The sky is blue.", "rejected": "The sky is black."}, [{"role": "user", "content": "The sky is"}], [{"role": "assistant", "content": "blue."}], [{"role": "assistant", "content": "black."}]),
    ("two_conversations", {"chosen_messages": [S, U, A], "rejected_messages": [S, U, NO]}, [S, U], [A], [NO]),
    ("alpaca_pairs", {"instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"}, [U], [A], [NO]),
    ("alpaca_outputs", {"instruction": "hi", "output": ["yo", "no"]}, [U], [A], [NO]),
]


@pytest.mark.parametrize(("shape", "raw", "prompt", "chosen", "rejected"), PAIRS)
def test_pairs(shape: str, raw: dict[str, Any], prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> None:
    found, row = convert(raw)
    assert (found, row.prompt, row.chosen, row.rejected) == (shape, prompt, chosen, rejected)


def test_parts_of_text_weights_and_tools() -> None:
    parts = {"role": "user", "content": [{"type": "text", "value": "h"}, {"type": "text", "text": "i"}], "loss_weight": 0.0}
    muted = {"role": "assistant", "content": "yo", "loss_weight": 0.0}
    _, row = convert({"chosen_messages": [parts, muted, U2, A], "rejected_messages": [parts, muted, U2, NO]})
    assert row.prompt == [U, {**A, "train": False}, U2]
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    seen = {"from": "observation", "value": "2"}
    _, row = convert({"conversations": [HUMAN, call, seen, GPT], "tools": '[{"name": "add"}]'})
    assert row.prompt[1] == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    assert row.prompt[2] == {"role": "tool", "content": "2"}
    assert row.tools == [{"name": "add"}]
    assert row.answer == "yo"


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": [U], "reward_model": {"style": "rule"}}, {}, 'column "reward_model": expected an object with ground_truth'),
    ({"prompt": [U, A], "label": "1"}, {}, "whose last one is not the assistant's"),
    ({"prompt": 7, "label": "1"}, {}, "found the number 7"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, {}, "found the text 'wizard'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, {}, "text parts alone"),
    ({"messages": []}, {}, "found the list []"),
    ({"messages": [A]}, {}, "a question before the assistant's answer"),
    ({"question": "hi", "answer": ["a"]}, {}, 'column "answer": expected a text, found the list'),
    ({"instruction": "hi", "output": "x", "history": [["a"]]}, {}, 'column "history"'),
    ({"prompt": "hi", "chosen": 1, "rejected": "x"}, {}, 'column "chosen": expected an answer'),
    ({"chosen": [U, A], "rejected": [U2, NO]}, {}, "the same question as in chosen"),
    ({"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": GPT}, {}, "a last turn that is not the assistant's"),
    ({"prompt": "hi", "answer": "72"}, {"answer_after": "####"}, "a text with '####'"),
]


@pytest.mark.parametrize(("raw", "settings", "said"), BAD)
def test_bad_rows_say_what_was_expected(raw: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow) as caught:
        convert(raw, **settings)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_mapping_by_meaning() -> None:
    raw = {"p": "hi", "more": "you", "who": "be brief", "box": {"truth": ["x", "yo"]}, "note": 5}
    shape, row = convert(raw, map={"prompt": "p", "query": "more", "response": "box.truth.1", "system": "who", "history": ""})
    assert shape == "mapped"
    assert row.prompt == [S, {"role": "user", "content": "hi\nyou"}]
    assert row.answer == "yo"
    assert row.extra == {"note": 5}
    _, row = convert({"q": [U], "good": "yo", "bad": [NO]}, map={"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert (row.prompt, row.chosen, row.rejected) == ([U], [A], [NO])
    _, row = convert({"talk": [HUMAN, GPT], "n": 3}, map={"messages": "talk", "answer": "n"})
    assert (row.prompt, row.answer) == ([U], "3")


def test_edits_of_a_recipe() -> None:
    _, row = convert({"question": "hi", "answer": "so #### much #### 7 "}, answer_after="####", system="be brief", prefix="<", suffix=">")
    assert row.prompt == [S, {"role": "user", "content": "<hi>"}]
    assert row.answer == "7"


def test_extra_columns() -> None:
    raw = {"prompt": [U], "reward_model": {"ground_truth": "1", "style": "rule"}, "extra_info": {"index": "7"}, "ability": "MATH"}
    assert convert(raw)[1].extra == {"reward_model": {"style": "rule"}, "extra_info": {"index": "7"}, "ability": "MATH"}
    assert convert(raw, keep=["extra_info.index"])[1].extra == {"extra_info.index": "7"}
    assert convert(raw, keep=[])[1].extra == {}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"foo": 1}, {}, "fit no known shape of rows: say which is which, for instance --map prompt=foo response=COLUMN"),
    ({"prompt": "hi", "answer": "1"}, {"kind": "pairs"}, "fit no known shape of pairs: say which is which, for instance --map prompt=prompt chosen=COLUMN rejected=COLUMN"),
    ({"prompt": "hi", "answer": "1"}, {"shape": "alpaka"}, "did you mean alpaca"),
    ({"prompt": "hi", "answer": "1"}, {"shape": "orca"}, "shape orca is"),
    ({"prompt": "hi", "problem": "1"}, {"map": {"prompt": "problm", "response": "prompt"}}, "did you mean problem"),
    ({"prompt": "hi"}, {"map": {"promt": "prompt"}}, "did you mean prompt"),
    ({"prompt": "hi"}, {"map": {"prompt": "prompt", "chosen": "prompt"}}, "needs prompt"),
    ({"prompt": "hi", "chosen": "1", "rejected": "2"}, {"kind": "prompts"}, "these rows are pairs (shape explicit)"),
    ({"question": "hi", "level": 3}, {}, "no column with answers"),
    ({"prompt": "hi", "answer": "1"}, {"keep": ["index"]}, "no column 'index' to keep"),
    ({"prompt": "hi", "chosen": "1", "rejected": "2"}, {"kind": "prompts", "map": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}, "--kind pairs"),
]


@pytest.mark.parametrize(("raw", "settings", "said"), WRONG)
def test_wrong_columns_end_with_one_line(raw: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(PrepareSettings(**settings), raw, Path("rows.jsonl"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_shapes_are_distinct() -> None:
    names = [name for shape in SHAPES for name in (shape.name, *shape.aliases)]
    assert len(names) == len(set(names))
    for predecessor in ("AlpacaStyleInstructionHandler", "AlpacaStylePairwiseHandler", "R1AlpacaStyleInstructionHandler", "Math17kAlpacaStyleInstructionHandler"):
        assert predecessor in names
