"""The whole preparation: nothing gets lost, nothing depends on how the work is shared out, and a folder is whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcli.data import workers
from rlcli.data.clean import STEPS
from rlcli.data.manifest import read_manifest
from rlcli.data.prepare import prepare
from rlcli.data.settings import PrepareSettings
from rlcli.data.store import PairSet, PromptSet
from rlcli.data.tokens import Encoder
from rlcli.errors import UserError

Prepared = Callable[..., Any]


def dapo(question: str, answer: str, index: int = 0) -> dict[str, Any]:
    return {"prompt": [{"content": question, "role": "user"}], "reward_model": {"ground_truth": answer, "style": "rule"}, "extra_info": {"index": str(index)}}


def hashes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_small_set_by_hand(prepared: Prepared) -> None:
    """Byte tokens: `<|im_start|>` 257, `<|im_end|>` 258, letters by their place among the printable bytes."""
    rows = [dapo("Hi", "1"), dapo("Hi", "1"), dapo(" Hi ", "1"), dapo("Hi", "2"), dapo("  ", "1"), dapo("Yo", ""), dapo("Long" * 20, "4"), dapo("Yo", "3", 9)]
    report = prepared(rows, max_prompt_tokens=40)
    counts = {name: count for name, count in report.manifest.counts.items() if count}
    assert counts == {"read": 8, "exact_duplicate": 1, "near_duplicate": 1, "empty_prompt": 1, "empty_answer": 1, "long_prompt": 1, "kept": 3}
    data = PromptSet.open(report.out)
    assert [data.prompt(i).answer for i in range(len(data))] == ["1", "2", "3"]
    first = data.prompt(0)

    def text(said: str) -> list[int]:
        return [_byte(letter) for letter in said.encode()]

    expected = [257, *text("user\nHi"), 258, *text("\n"), 257, *text("assistant\n")]
    assert first.token_ids.tolist() == expected
    assert first.token_ids.dtype == "int32"
    assert data.prompt(2).extra == {"extra_info": {"index": "9"}, "reward_model": {"style": "rule"}}
    assert report.manifest.notes["longest_prompt"] == len(expected) - 2 + 80
    conflicts = [json.loads(line) for line in (report.out / "conflicts.jsonl").read_text().splitlines()]
    assert [(item["question"], item["answers"]) for item in conflicts] == [("Hi", ["1", "2"])]
    assert [place.rpartition(":")[2] for place in conflicts[0]["rows"]] == ["1", "4"]


def _byte(value: int) -> int:
    """A byte's id: byte-level alphabets put the printable bytes at their own letters and the others from U+0100 on, then sort."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: byte for byte in printable} | {byte: 256 + n for n, byte in enumerate(others)}
    return sorted(letters.values()).index(letters[value])


def test_inclusive_limits(prepared: Prepared) -> None:
    rows = [dapo("x" * n, "1") for n in (1, 2, 3)]
    lengths = PromptSet.open(prepared(rows).out).lengths().tolist()
    assert lengths[1] == lengths[0] + 1
    kept = prepared(rows, out="short", max_prompt_tokens=lengths[1])
    assert kept.manifest.counts["kept"] == 2
    opened = PromptSet.open(prepared(rows, out="all").out, max_prompt_tokens=lengths[1])
    assert (len(opened), opened.left_out) == (2, 1)
    assert opened.fingerprint != PromptSet.open(opened.folder).fingerprint


def test_drop_conflicts(prepared: Prepared) -> None:
    rows = [dapo("a", "1"), dapo("b", "1"), dapo("a ", "2"), dapo("c", "1"), dapo("b", "1")]
    report = prepared(rows, conflicts="drop")
    assert {name: n for name, n in report.manifest.counts.items() if n} == {"read": 5, "conflict": 2, "exact_duplicate": 1, "kept": 2}
    assert len((report.out / "conflicts.jsonl").read_text().splitlines()) == 1


def test_without_deduplication_all_rows_stay(prepared: Prepared) -> None:
    report = prepared([dapo("a", "1")] * 3 + [dapo("a", "2")], deduplicate=False)
    assert report.manifest.counts["kept"] == 4
    assert report.manifest.notes["conflicting_prompts"] == 1


def test_held_out_rows_are_dropped(prepared: Prepared, jsonl: Callable[..., Path]) -> None:
    known = "Janet has nine ducks that lay two eggs a day each; how many eggs are there in a week?"
    held = jsonl([{"question": known, "answer": 3}], "held.jsonl")
    rows = [dapo(known, "126"), dapo(f"Solve the problem. {known} Answer with a number.", "126"), dapo("What is 1 + 1?", "2")]
    report = prepared(rows, exclude=[str(held)])
    assert {name: n for name, n in report.manifest.counts.items() if n} == {"read": 3, "excluded_exact": 1, "excluded_near": 1, "kept": 1}
    assert report.manifest.notes["held_out"] == 1


TEXT = st.text(st.sampled_from("ab \n\ud800é数"), max_size=5)
RAW = st.one_of(
    st.builds(dapo, TEXT, TEXT),
    st.fixed_dictionaries({"prompt": TEXT | st.none() | st.integers(), "reward_model": st.fixed_dictionaries({"ground_truth": TEXT | st.none() | st.lists(TEXT)}) | TEXT}),
    st.dictionaries(st.sampled_from(["prompt", "other"]), TEXT, max_size=2),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(RAW, max_size=14), share=st.sampled_from([0.0, 0.4]), limit=st.sampled_from([0, 45]), dedup=st.booleans())
def test_every_row_appears_or_is_counted(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_folder: Path, rows: list[Any], share: float, limit: int, dedup: bool) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [dapo("sure to stay", "1"), *rows]))
    made = PrepareSettings(input=[str(path)], out=str(folder / "out"), tokenizer=str(tiny_tokenizer_folder), on_bad_row="skip", validation=share, max_prompt_tokens=limit, deduplicate=dedup)
    try:
        report = prepare(made)
    except UserError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "no row is left for training" in said
        assert not (folder / "out").exists()
        return
    counts = report.manifest.counts
    assert counts["read"] == 1 + len(rows) == sum(counts[name] for name in (*STEPS, "kept", "validation"))
    shown = []
    for manifest, part in ((report.manifest, report.out), (report.validation, report.out / "validation")):
        if manifest is not None:
            assert manifest.rows == counts["kept" if manifest.part == "train" else "validation"]
            shown += [row for shard in manifest.files for row in pq.read_table(part / shard["file"])["row"].to_pylist()]
    skipped = report.out / "skipped.jsonl"
    named = [json.loads(line)["row"] for line in skipped.read_text(errors="replace").splitlines()] if skipped.exists() else []
    assert len(shown) == len(set(shown)) == counts["kept"] + counts["validation"]
    assert len(named) == counts["bad"] + counts["not_rendered"]
    assert not set(shown) & set(named)


def many_rows() -> list[dict[str, Any]]:
    """900 rows with repetitions, bad ones and long ones, over several chunks."""
    rows: list[dict[str, Any]] = [dapo(f"What is {i % 800} plus {i % 7}?", str(i % 800 + i % 7), i) for i in range(900)]
    rows[100] = {"prompt": 5, "reward_model": {"ground_truth": "1"}}
    rows[600] = dapo("z" * 300, "1")
    return rows


def test_same_bytes_for_every_number_of_workers(prepared: Prepared) -> None:
    common = {"on_bad_row": "skip", "validation": 0.1, "max_prompt_tokens": 200, "shard_rows": 300}
    one = prepared(many_rows(), out="one", **common)
    three = prepared(many_rows(), out="three", workers=3, **common)
    assert one.manifest.counts["bad"] == 1
    assert len(one.manifest.files) >= 2
    assert hashes(one.out) == hashes(three.out)


def test_rows_do_not_depend_on_files_or_shards(prepared: Prepared, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = many_rows()
    rows[100] = dapo("fine", "1")
    pq.write_table(pa.Table.from_pylist(rows[:333]), tmp_path / "a.parquet")
    jsonl(rows[333:700], "b.jsonl")
    jsonl(rows[700:], "c.jsonl")
    whole = prepared(rows, out="whole")
    parts = prepared(None, out="parts", input=[str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.jsonl")], shard_rows=77)
    assert len(parts.manifest.files) > 5
    assert parts.manifest.counts == whole.manifest.counts
    left, right = PromptSet.open(whole.out), PromptSet.open(parts.out)
    assert len(left) == len(right)
    for i in range(len(left)):
        a, b = left.prompt(i), right.prompt(i)
        assert (a.token_ids.tolist(), a.answer, a.extra) == (b.token_ids.tolist(), b.answer, b.extra)


def test_chunks_do_not_matter(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dapo(f"q{i}", "1") for i in range(20)]
    one = prepared(rows, out="one")
    for module in (workers, __import__("rlcli.data.pipeline", fromlist=["CHUNK"])):
        monkeypatch.setattr(module, "CHUNK", 3)
    assert one.manifest.fingerprint == prepared(rows, out="two").manifest.fingerprint


def test_again_does_nothing_and_changes_are_said(prepared: Prepared) -> None:
    rows = [dapo("a", "1"), dapo("b", "2")]
    first = prepared(rows)
    before = {path: path.stat().st_mtime_ns for path in first.out.iterdir()}
    again = prepared(rows, workers=2, log_interval=5)
    assert again.unchanged
    assert {path: path.stat().st_mtime_ns for path in first.out.iterdir()} == before
    with pytest.raises(UserError, match=r"max_prompt_tokens: 0 -> 99; template: none -> chatml\).*--overwrite") as caught:
        prepared(rows, max_prompt_tokens=99, template="chatml")
    assert "sources" not in str(caught.value)
    with pytest.raises(UserError, match="sources changed"):
        prepared([*rows, dapo("c", "3")])
    assert prepared([*rows, dapo("c", "3")], overwrite=True).manifest.rows == 3
    (first.out.parent / "full").mkdir()
    (first.out.parent / "full" / "thesis.txt").write_text("dear to me")
    with pytest.raises(UserError, match="is no data set"):
        prepared(rows, out="full", overwrite=True)


def test_bad_rows_stop_or_are_listed(prepared: Prepared) -> None:
    rows = [dapo("a", "1"), {"prompt": [{"role": "user", "content": 7}], "reward_model": {"ground_truth": "1"}}, dapo("b", "2")]
    with pytest.raises(UserError) as caught:
        prepared(rows)
    said = str(caught.value)
    for part in ("rows.jsonl, line 2", 'column "prompt"', "text as content", "the number 7", "--on-bad-row skip"):
        assert part in said
    assert not list(Path(said.split(",")[0]).parent.glob(".out*"))
    report = prepared(rows, on_bad_row="skip")
    (skipped,) = [json.loads(line) for line in (report.out / "skipped.jsonl").read_text().splitlines()]
    assert (skipped["row"], skipped["column"], skipped["problem"]) == (2, "prompt", "found the number 7")
    assert report.manifest.counts["kept"] == 2


def test_files_of_different_shapes_are_refused(prepared: Prepared, jsonl: Callable[..., Path]) -> None:
    a = jsonl([dapo("a", "1")], "a.jsonl")
    b = jsonl([{"instruction": "a", "output": "1"}], "b.jsonl")
    with pytest.raises(UserError, match=r"b.jsonl has rows of shape alpaca, .*a.jsonl of shape verl"):
        prepared(None, input=[str(a), str(b)])


def test_nested_types_that_differ_between_shards_end_with_one_line(prepared: Prepared, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([dapo("a", "1")]), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": [["a"]], "reward_model": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet, row 1: column ") as caught:
        prepared(None, input=[str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"kind": "promts"}, "did you mean prompts"), ({"validation": 0.95}, "validation must be"), ({"workers": 0}, "at least 1"),
    ({"tokenizer": "/nowhere"}, "no such folder"), ({"tokenizer": ""}, "no tokenizer"),
])
def test_wrong_settings(prepared: Prepared, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepared([dapo("a", "1")], **wrong)


def test_pairs(prepared: Prepared, tiny_tokenizer_folder: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "same ", "rejected": " same"},
        {"prompt": "q", "chosen": "", "rejected": "bad"},
        {"prompt": "q", "chosen": "x" * 200, "rejected": "bad"},
        {"prompt": "q", "chosen": "bad", "rejected": "good"},
    ]
    report = prepared(rows, max_tokens=150)
    assert {name: n for name, n in report.manifest.counts.items() if n} == {"read": 5, "same_answers": 1, "empty_answer": 1, "long": 1, "kept": 2}
    data = PairSet.open(report.out)
    pair = data.pair(1)
    encoder = Encoder(str(tiny_tokenizer_folder), None, None)
    assert encoder.tokenizer.decode(pair.chosen) == "bad<|im_end|>"
    assert encoder.tokenizer.decode(pair.rejected) == "good<|im_end|>"
    assert pair.prompt.tolist() == encoder.ids(["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"])[0]
    assert [mask.tolist() for mask in pair.masks()] == [[1.0] * 4, [1.0] * 5]
    assert pair.prompt_roles.tolist() == [0] * len(pair.prompt)


def test_masks_of_conversations_that_part_early(prepared: Prepared) -> None:
    def talk(first: str, last: str) -> list[dict[str, str]]:
        turns = [("user", "q"), ("assistant", first), ("user", "r"), ("assistant", last)]
        return [{"role": role, "content": content} for role, content in turns]

    report = prepared([{"chosen": talk("ab", "c"), "rejected": talk("d", "e")}])
    pair = PairSet.open(report.out).pair(0)
    chosen, rejected = pair.masks("all_answers")
    assert (int(chosen.sum()), int(rejected.sum())) == (3 + 2, 2 + 2)  # letters and an end mark for each answer
    chosen, rejected = pair.masks("last_answer")
    assert (int(chosen.sum()), int(rejected.sum())) == (2, 2)
    assert chosen[-2:].tolist() == [1.0, 1.0]
    assert read_manifest(report.out).kind == "pairs"
