"""What the benchmark of DPO makes of its measurements, and of rows in the usual forms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_the_ratio_is_the_smaller_of_both(script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    """TRL: 8 pairs in 16 s, the reference 1 s a pair: an epoch's pair takes 2 + 1 s. msrl: 8 pairs in 4 s and 1/4 s: 0.5 + 0.25 s."""
    bench = script("bench_dpo")
    sides = [bench.Side("TRL", [20.0, 16.0, 15.0], 1.0, 8.0, [0.6931]), bench.Side("msrl", [4.0, 4.0, 9.0], 0.25, 4.0, [0.6931], "500 tokens a pair")]
    assert [side.rate(8) for side in sides] == [0.5, 2.0]
    assert [side.epoch_rate(8) for side in sides] == pytest.approx([1 / 3, 4 / 3])
    bench.report(sides, argparse.Namespace(batch=8, tokens=512, cores=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ratio 4.00"
    assert "msrl        4.00      2.00               4.00           1.33      4.00      3   500 tokens a pair" in lines


def test_pairs_of_both_forms_read_the_same(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    (tmp_path / "one.json").write_text(json.dumps([{"conversations": turns, "chosen": {"from": "gpt", "value": "d"}, "rejected": {"from": "gpt", "value": "e"}}]))
    (tmp_path / "two.jsonl").write_text(
        json.dumps({"prompt": talk, "chosen": [{"role": "assistant", "content": "d"}], "rejected": [{"role": "assistant", "content": "e"}]}) + "\n"
    )
    read = script("bench_dpo").read_pairs
    expected = [{"prompt": talk, "chosen": [{"role": "assistant", "content": "d"}], "rejected": [{"role": "assistant", "content": "e"}]}]
    assert read(tmp_path / "one.json") == read(tmp_path / "two.jsonl") == expected
