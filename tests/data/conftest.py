"""Tokenizers and row files of the data tests: all made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

Rows = Iterable[dict[str, Any]]


@pytest.fixture(scope="session")
def bos_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE tokenizer with merges that puts <s> before every text by itself, has no chat template, and merges across blanks.

    Trained on a few words: "ab" is one token, so a prompt that ends in "a" before an answer that begins with "b" is a merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["abab ab the the cat sat on the mat", "abc ab ab"] * 20, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    folder = tmp_path_factory.mktemp("bos_tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows into a .jsonl file of a name."""

    def write(rows: Rows, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prepared(tmp_path: Path, tiny_tokenizer_folder: Path, jsonl: Callable[..., Path]) -> Callable[..., Any]:
    """Prepares rows (or files given as `input`) with the tiny tokenizer; returns the report."""
    from rlcli.data.prepare import prepare
    from rlcli.data.settings import PrepareSettings

    def run(rows: Rows | None = None, out: str = "out", **settings: Any) -> Any:
        if rows is not None:
            settings["input"] = [str(jsonl(rows))]
        settings.setdefault("tokenizer", str(tiny_tokenizer_folder))
        return prepare(PrepareSettings(out=str(tmp_path / out), **settings))

    return run
