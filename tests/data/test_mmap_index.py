"""Megatron's .bin/.idx sets, written here byte by byte from the format's description."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.data.sources import find_sources, read_rows
from rlcli.data.store import PairSet, PromptSet
from rlcli.data.tokens import load_tokenizer
from rlcli.errors import UserError

CODES = {np.dtype(np.int32): 4, np.dtype(np.int64): 5, np.dtype(np.uint16): 8}


def write(prefix: Path, key: str, rows: list[list[int]], dtype: Any = np.int32) -> Path:
    """One key of a set: a document with one sequence for each row."""
    base = prefix.with_name(f"{prefix.name}_packed_{key}_document")
    arrays = [np.array(row, dtype) for row in rows]
    base.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = [array.nbytes for array in arrays]
    offsets = [sum(sizes[:i]) for i in range(len(rows))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[np.dtype(dtype)], len(rows), len(rows) + 1)
    index += np.array([len(row) for row in rows], np.int32).tobytes() + np.array(offsets, np.int64).tobytes()
    index += np.arange(len(rows) + 1, dtype=np.int64).tobytes()
    base.with_suffix(".idx").write_bytes(index)
    return base


@pytest.mark.parametrize("dtype", list(CODES))
def test_rows_of_a_set(tmp_path: Path, dtype: Any) -> None:
    prefix = tmp_path / "math"
    base = write(prefix, "input_ids", [[1, 2, 3], [], [4]], dtype)
    write(prefix, "labels", [[7], [8, 9], [10]], dtype)
    write(prefix, "attention_mask", [[1, 1, 1], [], [1]], dtype)
    expected = [{"input_ids": [1, 2, 3], "labels": [7]}, {"input_ids": [], "labels": [8, 9]}, {"input_ids": [4], "labels": [10]}]
    for given in (str(prefix), str(tmp_path), str(base.with_suffix(".idx")), str(base.with_suffix(".bin"))):
        (source,) = find_sources([given])
        assert [row for _, row in read_rows(source)] == expected
        assert source.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_prompts_need_no_second_tokenisation(tmp_path: Path, prepared: Callable[..., Any], tiny_tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizer_folder))
    prompts = [tokenizer(text)["input_ids"] for text in ("<|im_start|>user\nq<|im_end|>\n", "other")]
    write(tmp_path / "math", "input_ids", prompts)
    write(tmp_path / "math", "labels", [tokenizer("42<|im_end|>")["input_ids"], tokenizer("7")["input_ids"]])
    report = prepared(None, input=[str(tmp_path / "math")])
    assert report.manifest.shape == "megatron"
    data = PromptSet.open(report.out)
    assert [data.prompt(i).token_ids.tolist() for i in range(2)] == prompts
    assert [data.prompt(i).answer for i in range(2)] == ["42", "7"]


def test_labels_that_mask_the_prompt(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    write(tmp_path / "sft", "input_ids", [[5, 6, 7, 8]])
    write(tmp_path / "sft", "labels", [[-100, -100, 7, 8]])
    data = PromptSet.open(prepared(None, input=[str(tmp_path / "sft")]).out)
    assert data.prompt(0).token_ids.tolist() == [5, 6]


def test_pairs(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    prefix = tmp_path / "orca"
    write(prefix, "chosen_input_ids", [[5, 6, 7, 8], [1, 2, 3]])
    write(prefix, "chosen_labels", [[-100, -100, 7, 8], [-100, 2, 3]])
    write(prefix, "rejected_input_ids", [[5, 6, 9], [1, 2, 3]])
    write(prefix, "rejected_labels", [[-100, -100, 9], [-100, 2, 3]])
    report = prepared(None, input=[str(prefix)])
    assert {name: n for name, n in report.manifest.counts.items() if n} == {"read": 2, "same_answers": 1, "kept": 1}
    pair = PairSet.open(report.out).pair(0)
    assert [pair.prompt.tolist(), pair.chosen.tolist(), pair.rejected.tolist()] == [[5, 6], [7, 8], [9]]


def test_another_tokenizers_ids_are_a_bad_row(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    write(tmp_path / "math", "input_ids", [[5, 4000]])
    write(tmp_path / "math", "labels", [[5]])
    with pytest.raises(UserError, match="made with another tokenizer"):
        prepared(None, input=[str(tmp_path / "math")])


def test_damaged_sets(tmp_path: Path) -> None:
    base = write(tmp_path / "math", "input_ids", [[1, 2, 3], [4]])
    index, data = base.with_suffix(".idx"), base.with_suffix(".bin")
    good = index.read_bytes()

    def said(content: bytes) -> str:
        index.write_bytes(content)
        with pytest.raises(UserError) as caught:
            list(read_rows(find_sources([str(index)])[0]))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no Megatron index" in said(b"something else")
    assert "cut off" in said(good[:20])
    assert "cut off" in said(good[:-4])
    assert "type code 99" in said(good[:17] + b"\x63" + good[18:])
    data.write_bytes(data.read_bytes()[:-1])
    assert "16 bytes" in said(good)
    data.unlink()
    assert "is missing" in said(good)
    write(tmp_path / "math", "input_ids", [[1]])
    write(tmp_path / "math", "labels", [[1], [2]])
    with pytest.raises(UserError, match="different numbers of rows"):
        list(read_rows(find_sources([str(tmp_path / "math")])[0]))
