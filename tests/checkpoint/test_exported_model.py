"""A model that went to Megatron shards and back generates in transformers and in vLLM, with no edit, what it generated before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.models.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [list(range(10, 40)), list(range(97, 123))]


def tokens(who: str, folder: Path) -> list[list[int]]:
    words = [sys.executable, str(ROOT / "scripts" / "generate_with.py"), who, str(folder), "float32", "16", json.dumps(PROMPTS)]
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[list[int]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.engine
def test_an_exported_folder_generates_in_vllm_and_transformers(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model_factory("llama", tie=True)
    convert(Conversion(model, tmp_path / "mcore", "mcore", layout=Layout(tensor=2, pipeline=2)))
    convert(Conversion(tmp_path / "mcore", tmp_path / "hf", "hf", named="mcore"))
    before = tokens("transformers", model)
    assert [len(ids) for ids in before] == [16, 16]
    assert before[0] != before[1]
    assert tokens("transformers", tmp_path / "hf") == before
    assert tokens("vllm", tmp_path / "hf") == before
