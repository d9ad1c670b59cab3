"""The makers of the demo's data and of tiny models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest


def sums(path: Path) -> list[tuple[int, int, str]]:
    """Operands of each row's question, read from its text, and the answer it names."""
    rows = pq.read_table(path).to_pylist()
    found = [re.fullmatch(r"What is (\d+) \+ (\d+)\?", row["prompt"][-1]["content"]) for row in rows]
    return [(int(m[1]), int(m[2]), row["reward_model"]["ground_truth"]) for m, row in zip(found, rows, strict=True) if m]


def test_answers_are_right_and_held_out_sums_never_occur_in_training(demo_data_folder: Path) -> None:
    train, test = (sums(demo_data_folder / f"add20.{name}.parquet") for name in ("train", "test"))
    assert (len(train), len(test)) == (320, 64)
    assert all(answer == str(a + b) for a, b, answer in train + test)
    assert len({(a, b) for a, b, _ in train}) == 320
    assert not {frozenset((a, b)) for a, b, _ in train} & {frozenset((a, b)) for a, b, _ in test}


def test_rows_have_two_worked_turns_before_the_question(demo_data_folder: Path) -> None:
    row = pq.read_table(demo_data_folder / "add20.train.parquet").to_pylist()[0]
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user", "assistant", "user"]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert [row["prompt"][1]["content"], row["prompt"][3]["content"]] == ["Answer: 8", "Answer: 19"]


def test_pairs_differ_and_only_the_chosen_is_right_and_in_format(demo_data_folder: Path) -> None:
    rows = [json.loads(line) for line in (demo_data_folder / "pairs.train.jsonl").read_text().splitlines()]
    assert len(rows) == 320
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["prompt"][-1]["content"]))
        assert row["chosen"][0]["content"] == f"Answer: {a + b}"
        assert row["rejected"][0]["content"] != f"Answer: {a + b}"
    assert {len(row["prompt"]) for row in rows} == {1, 2, 5}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script("make_demo_data").make(tmp_path / name, train=50, test=10, seed=seed)
    for file in ("add20.train.parquet", "add20.test.parquet", "pairs.train.jsonl"):
        first, again, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert first == again
        assert first != other


@pytest.mark.parametrize(("kind", "tie"), [("llama", True), ("qwen2", False), ("qwen3", True), ("mistral", False), ("qwen3_moe", False)])
def test_tiny_models_load_in_transformers_with_no_weight_at_its_start(tiny_model_factory: Callable[..., Path], kind: str, tie: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_factory(kind, tie)
    assert tiny_model_factory(kind, tie) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == kind
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tie
    for name, weight in model.named_parameters():
        assert weight.std() > 0.01, name
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.std() > 0.1


def test_the_tiny_tokenizer_keeps_any_text(tiny_tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    text = "What is 3 + 5?\n\t é 漢字 \x00 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [256, 257, 258]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 257
