"""`msrl data` as a user meets it: what is printed, what it exits with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlcli.app import main
from rlcli.config import recipes
from rlcli.data.lengths import histogram, statistics
from rlcli.data.prepare import PrepareReport
from rlcli.data.recipe import load_settings
from rlcli.data.settings import PrepareSettings
from rlcli.data.summary import human_bytes, summary
from rlcli.errors import UserError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `msrl` in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*args: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            main(list(args))
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return int(code), told.out, told.err

    return call


ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "level": i} for i in range(30)]


def test_prep_show_and_check(run: Run, jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    path, out = jsonl([*ROWS, ROWS[0], {"problem": "What is  0 + 0?", "answer": "1", "level": 0}]), tmp_path / "out"
    prep = ("data", "prep", "--input", str(path), "--map", "prompt=problem", "response=answer", "--tokenizer", str(tiny_tokenizer_folder), "--out", str(out), "--validation", "0.2")
    code, told, _ = run(*prep)
    assert code == 0
    manifest = json.loads((out / "manifest.json").read_text())
    kept, apart = manifest["counts"]["kept"], manifest["counts"]["validation"]
    assert kept + apart == 31
    for line in ("32  rows read", "-1  repeat an earlier row exactly", f"{kept}  prompts to train on", f"{apart}  prompts set apart for validation", "1 prompt came with different answers"):
        assert line in told
    code, told, _ = run(*prep)
    assert code == 0
    assert "unchanged: nothing to do" in told
    code, told, _ = run("data", "show", str(out), "-n", "2")
    assert code == 0
    assert "<|im_start|>user\nWhat is 1 + 1?<|im_end|>" in told
    assert "⟦the model's response⟧" in told
    assert "answer 2" in told
    assert "█" in told
    code, told, _ = run("data", "check", str(out), "--tokenizer", str(tiny_tokenizer_folder))
    assert (code, told.count("ok  ")) == (0, 4)
    (out / "part-00000.parquet").write_bytes(b"PAR1")
    code, _, told = run("data", "check", str(out))
    assert code == 2
    assert "changed since it was made" in told


def test_pairs_are_shown_with_what_is_trained_on(run: Run, jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "[b]q"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "r"}]
    chosen, rejected = ([*talk[:1], {"role": "assistant", "content": said}, talk[2], {"role": "assistant", "content": "end"}] for said in ("one", "two"))
    path = jsonl([{"chosen": chosen, "rejected": rejected}])
    run("data", "prep", "-i", str(path), "-t", str(tiny_tokenizer_folder), "-o", str(tmp_path / "out"))
    code, told, _ = run("data", "show", str(tmp_path / "out"))
    assert code == 0
    assert "<|im_start|>user\n[b]q<|im_end|>" in told  # the rows' own brackets are no markup
    assert "one<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦end<|im_end|>⟧" in told
    code, told, _ = run("data", "show", str(tmp_path / "out"), "--train-on", "all_answers")
    assert "⟦two<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦end<|im_end|>⟧" in told
    code, _, told = run("data", "show", str(tmp_path / "out"), "--train-on", "everything")
    assert code == 2


@pytest.mark.parametrize(("args", "said"), [
    (["--input", "none.jsonl"], "none.jsonl: no such file"),
    ([], "no input"),
    (["--dataset", "math_18k"], "Did you mean math_17k"),
    (["max_promt_tokens=3"], "did you mean max_prompt_tokens"),
    (["max_prompt_tokens=many"], "max_prompt_tokens needs a whole number"),
    (["rows.jsonl"], "files are given with --input"),
    (["--map", "prompt"], "write MEANING=COLUMN"),
    (["--on-bad-row", "ignore"], "on_bad_row must be stop or skip"),
])
def test_wrong_input_ends_with_one_line(run: Run, args: list[str], said: str, tmp_path: Path) -> None:
    code, told, wrong = run("data", "prep", "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path), *args)
    assert code == 2
    assert said in wrong
    assert not told
    assert not (tmp_path / "out").exists()


def test_shapes_are_listed(run: Run) -> None:
    code, told, _ = run("data", "prep", "--shapes")
    assert code == 0
    assert "verl" in told
    assert "two_conversations" in told


def test_progress_without_a_terminal(run: Run, jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    path = jsonl([{"prompt": f"q{i}", "answer": "1"} for i in range(1000)])
    code, _, told = run("data", "prep", "-i", str(path), "-t", str(tiny_tokenizer_folder), "-o", str(tmp_path / "out"), "--log-interval", "400")
    assert code == 0
    lines = [line for line in told.splitlines() if "rows read" in line]
    assert [line.split(" ")[0] for line in lines] == ["512", "1,000"]
    assert all("rows/s" in line and "s left" in line for line in lines)


def test_what_a_command_imports(run: Run) -> None:
    """`--help` and wrong input are answered without transformers."""
    import subprocess

    code = "import sys, rlcli.app\ntry:\n    rlcli.app.main(['data', 'prep', '--help'])\nexcept SystemExit:\n    pass\nprint([m for m in ('torch', 'transformers', 'pyarrow', 'ray') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.rstrip().endswith("[]")


def test_every_packaged_data_recipe_is_valid() -> None:
    found = recipes.available("data")
    assert {"math_17k", "gsm8k", "orca_rlhf", "generic"} <= set(found)
    for name, path in found.items():
        settings = load_settings(name, {"input": ["x"]}, [], [])
        assert settings.input == ["x"]
        assert recipes.purpose(path)
    assert load_settings("orca_rlhf", {}, [], []).kind == "pairs"
    assert load_settings("gsm8k", {}, [], []).map == {"prompt": "question", "response": "answer"}


def test_what_overrides_what(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("max_prompt_tokens: 5\nvalidation: 0.1\ninput: rows.csv\nenable_thinking: false\nkeep: [a, b]\n")
    settings = load_settings(str(recipe), {"max_prompt_tokens": 7, "seed": None}, ["max_prompt_tokens=6", "validation=0.2"], [])
    expected = PrepareSettings(max_prompt_tokens=7, validation=0.2, input=["rows.csv"], enable_thinking=False, keep=["a", "b"])
    assert settings == expected
    assert load_settings(None, {}, ["system=be brief"], []).system == "be brief"
    assert load_settings(None, {}, ["system=who"], ["prompt=p"]).map == {"prompt": "p", "system": "who"}
    assert load_settings(None, {}, [], ["prompt=p response=r"]).map == {"prompt": "p", "response": "r"}
    recipe.write_text("map: prompt\n")
    with pytest.raises(UserError, match="map needs columns by meaning"):
        load_settings(str(recipe), {}, [], [])


def test_summary_names_what_was_dropped(prepared: Callable[..., PrepareReport]) -> None:
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (1, 100)]
    report = prepared([*rows, {"prompt": 1.5, "answer": [1]}], max_prompt_tokens=60, on_bad_row="skip", enable_thinking=True)
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        for line in summary(report):
            console.print(line)
    text = captured.get()
    longest = report.manifest.notes["longest_prompt"]
    for said in (f"-1  prompt too long (over 60 tokens; the longest has {longest})", "-1  could not be read (listed in skipped.jsonl)", "1  prompts to train on", "this template knows no thinking"):
        assert said in text
    assert len(text.splitlines()) < 25


def test_numbers_for_reading() -> None:
    assert [human_bytes(n) for n in (999, 1500, 250_000, 3_200_000_000)] == ["999 B", "1.5 kB", "250 kB", "3.2 GB"]
    assert statistics([5, 1, 3, 2, 4]) == {"min": 1, "mean": 3.0, "p50": 3, "p90": 5, "p99": 5, "max": 5, "sum": 15}
    assert histogram([3, 4, 4, 9], bars=3) == [(3, 5, 3), (6, 8, 0), (9, 9, 1)]
    assert histogram([7]) == [(7, 7, 1)]
