"""A run's data: prepared folders that fit, files prepared on the way, and what is said where something does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.data import store
from rlcli.data.check import check
from rlcli.data.prepare import open_or_prepare
from rlcli.data.store import PairSet, PromptSet
from rlcli.errors import UserError

Prepared = Callable[..., Any]
ROWS = [{"prompt": f"question {'x' * (i % 9)} {i}", "answer": str(i), "level": i} for i in range(1100)]


def test_rows_by_number_over_groups_and_files(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CACHED_GROUPS", 2)
    data = PromptSet.open(prepared(ROWS, shard_rows=600).out)
    assert len(data.manifest.files) == 2
    order = np.random.default_rng(0).permutation(len(ROWS))
    for i in order.tolist():
        prompt = data.prompt(i)
        assert (prompt.id, prompt.answer, prompt.extra) == (i, str(i), {"level": i})
        assert len(prompt.token_ids) == data.lengths()[i]
    for wrong in (-1, len(ROWS)):
        with pytest.raises(IndexError):
            data.prompt(wrong)


def test_numbers_within_limits_go_on_without_gaps(prepared: Prepared) -> None:
    whole = PromptSet.open(prepared(ROWS).out)
    limit = int(np.median(whole.lengths()))
    part = PromptSet.open(whole.folder, max_prompt_tokens=limit)
    expected = [i for i in range(len(whole)) if len(whole.prompt(i).token_ids) <= limit]
    assert 0 < len(part) < len(whole)
    assert part.left_out == len(whole) - len(part)
    assert [int(part.prompt(i).answer) for i in range(len(part))] == expected
    assert [part.prompt(i).id for i in range(3)] == [0, 1, 2]
    assert part.lengths().max() <= limit


def test_files_are_prepared_once(jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    path, cache = jsonl(ROWS[:20]), tmp_path / "cache"

    def open_it(**more: Any) -> Any:
        return open_or_prepare(str(path), "prompts", str(tiny_tokenizer_folder), cache_dir=cache, **more)

    first = open_it()
    assert len(first) == 20
    made = first.folder.stat().st_mtime_ns
    assert open_it().folder == first.folder
    assert open_it(max_prompt_tokens=60).folder == first.folder  # the limit is applied on opening
    assert open_it().folder.stat().st_mtime_ns == made
    assert open_it(template="qwen").folder != first.folder
    jsonl(ROWS[:21])
    second = open_it()
    assert second.folder != first.folder
    assert len(second) == 21
    with pytest.raises(UserError, match="none of its 21 rows has a prompt of at most 3 tokens"):
        open_it(max_prompt_tokens=3)
    assert len(list(cache.iterdir())) == 3


def test_pairs_on_the_way(jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    path = jsonl([{"prompt": "q", "chosen": "a", "rejected": "b"}])
    pairs = open_or_prepare(str(path), "pairs", str(tiny_tokenizer_folder), cache_dir=tmp_path / "cache")
    assert isinstance(pairs, PairSet)
    assert len(pairs) == 1
    with pytest.raises(UserError, match=r"these rows are pairs \(shape explicit\), not prompts"):
        open_or_prepare(str(path), "prompts", str(tiny_tokenizer_folder), cache_dir=tmp_path / "cache")
    with pytest.raises(UserError, match="holds pairs, not prompts"):
        open_or_prepare(str(pairs.folder), "prompts", str(tiny_tokenizer_folder))


def test_another_tokenizer_is_refused(prepared: Prepared, tiny_tokenizer_folder: Path, bos_tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = prepared([{"prompt": "q", "answer": "1"}]).out
    fits = open_or_prepare(str(folder), "prompts", str(tiny_tokenizer_folder))
    assert len(fits) == 1
    with pytest.raises(UserError, match=rf"another tokenizer than the model's in .*the vocabulary differs.*Run: msrl data prep --input .*rows.jsonl .*--tokenizer {bos_tokenizer_folder} .*--overwrite"):
        open_or_prepare(str(folder), "prompts", str(bos_tokenizer_folder))
    changed = tmp_path / "changed"
    shutil.copytree(tiny_tokenizer_folder, changed)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    with pytest.raises(UserError, match="another chat template"):
        open_or_prepare(str(folder), "prompts", str(changed))
    with pytest.raises(UserError, match=r"another chat template \(tokenizer\) than qwen.*--template qwen"):
        open_or_prepare(str(folder), "prompts", str(tiny_tokenizer_folder), template="qwen")
    with pytest.raises(UserError, match=r"enable_thinking=None, the run has False.*--no-thinking"):
        open_or_prepare(str(folder), "prompts", str(tiny_tokenizer_folder), enable_thinking=False)


def test_the_same_tokenizer_saved_again_fits(prepared: Prepared, tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    """Other bytes in tokenizer.json, the same meaning."""
    folder = prepared([{"prompt": "q", "answer": "1"}]).out
    again = tmp_path / "again"
    shutil.copytree(tiny_tokenizer_folder, again)
    path = again / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=None, sort_keys=True))
    assert path.read_bytes() != (tiny_tokenizer_folder / "tokenizer.json").read_bytes()
    assert len(open_or_prepare(str(folder), "prompts", str(again))) == 1


def test_same_vocabulary_with_other_merges_is_refused(prepared: Prepared, bos_tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = prepared([{"prompt": "q", "answer": "1"}], tokenizer=str(bos_tokenizer_folder), template="chatml").out
    other = tmp_path / "other"
    shutil.copytree(bos_tokenizer_folder, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["model"]["merges"]
    content["model"]["merges"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="the way text is split differs"):
        open_or_prepare(str(folder), "prompts", str(other))


def test_check_finds_what_was_changed(prepared: Prepared, tiny_tokenizer_folder: Path) -> None:
    report = prepared(ROWS[:40], validation=0.3)
    done, faults = check(report.out, str(tiny_tokenizer_folder))
    assert not faults
    assert len(done) == 4
    part = report.out / "part-00000.parquet"
    good = part.read_bytes()
    part.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "changed since it was made" in check(report.out)[1][0]
    part.write_bytes(good)
    (report.out / "part-00007.parquet").write_bytes(good)
    assert "is not in the manifest" in check(report.out)[1][0]
    (report.out / "part-00007.parquet").unlink()
    part.unlink()
    assert check(report.out)[1] == [f"{part}: missing"]
    with pytest.raises(UserError, match="missing: prepare the data anew"):
        PromptSet.open(report.out)


def _rewritten(folder: Path, **columns: Any) -> list[str]:
    """The faults of a set whose shard and manifest were both written anew with other columns."""
    from rlcli.data.shards import file_sha256

    part, manifest = folder / "part-00000.parquet", folder / "manifest.json"
    table = pq.read_table(part)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), pa.array(values, table.schema.field(name).type))
    pq.write_table(table, part)
    content = json.loads(manifest.read_text())
    content["files"][0] |= {"bytes": part.stat().st_size, "sha256": file_sha256(part)}
    content["counts"]["read"] += 1
    manifest.write_text(json.dumps(content))
    return check(folder)[1]


def test_check_reads_the_rows(prepared: Prepared) -> None:
    folder = prepared([{"prompt": "ab", "answer": "1"}, {"prompt": "cd", "answer": "1"}]).out
    ids = pq.read_table(folder / "part-00000.parquet")["prompt_ids"].to_pylist()
    faults = _rewritten(folder, prompt_ids=[ids[0], [*ids[1][:-1], 9999]])
    assert faults[0] == "the counts do not add up: 3 rows read, 2 accounted for"
    assert "row 1: prompt has the id 9999" in faults[1]
    faults = _rewritten(folder, prompt_ids=[[], ids[1]])
    assert any("row 0: prompt is empty" in fault for fault in faults)
    assert any("row 0: prompt has 0 ids, the row says otherwise" in fault for fault in faults)


def test_damaged_manifests(prepared: Prepared, tmp_path: Path) -> None:
    folder = prepared([{"prompt": "ab", "answer": "1"}]).out
    path = folder / "manifest.json"
    good = json.loads(path.read_text())
    for content, said in (("{", "damaged"), (json.dumps(good | {"schema": 99}), "another version of msrl"), ("[]", "damaged"), (json.dumps({"schema": 1}), "damaged")):
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            PromptSet.open(folder)
    with pytest.raises(UserError, match="no data set made by `msrl data prep`"):
        PromptSet.open(tmp_path)


NAMELESS = [
    ("prompts", {"foo": "1", "bar": "2"}, "--map prompt=foo response=COLUMN"),
    ("prompts", {"question": "1", "level": "2"}, "--map prompt=question response=COLUMN"),
    ("pairs", {"foo": "1", "bar": "2"}, "--map prompt=foo chosen=COLUMN rejected=COLUMN"),
]


@pytest.mark.parametrize(("kind", "row", "naming"), NAMELESS)
def test_a_run_is_told_the_command_that_names_columns(
    kind: str, row: dict[str, str], naming: str, jsonl: Callable[..., Path], tiny_tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = jsonl([row])
    with pytest.raises(UserError) as caught:
        open_or_prepare(str(path), kind, str(tiny_tokenizer_folder), cache_dir=tmp_path / "cache")
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert line.endswith(f": msrl data prep --input {path} --kind {kind} --tokenizer {tiny_tokenizer_folder} --out DIR {naming}")
    assert "\n" not in line
