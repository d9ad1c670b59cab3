"""The cache of reference log-probs: what it gives back, going on half-way, keys, damage, folders that cannot be written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlcli.config.schema import PairsConfig
from rlcli.data.prepare import open_or_prepare
from rlcli.data.store import PairSet
from rlcli.errors import RunError, StoppedEarly, UserError
from rlcli.trainers import reference
from rlcli.trainers.pair_rows import Pairs
from rlcli.trainers.reference import PART_PAIRS, ReferenceCache, Scores, cache_key, weights_digest
from rlcli.types import TrainRow

COUNT = 2 * PART_PAIRS + 5  # three parts, the last one short


class Model:
    """Gives each token a log-prob made of its id and its place, and counts the pairs it was asked for."""

    def __init__(self, broken_after: int = 10**9) -> None:
        self.pairs, self.broken_after = 0, broken_after

    def __call__(self, rows: Sequence[TrainRow]) -> Scores:
        if self.pairs + len(rows) > self.broken_after:
            raise RunError("reference log-probs: train rank 0 died")
        self.pairs += len(rows)
        return [[-(response + np.arange(len(response)) / 100).astype(np.float32) for response in row.responses] for row in rows]


@pytest.fixture(scope="module")
def prepared(tiny_tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"Number {n}?", "chosen": f"It is {n}." * (1 + n % 3), "rejected": f"It is {n + 1}, I think."} for n in range(COUNT)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_or_prepare(str(folder / "rows.jsonl"), "pairs", str(tiny_tokenizer_folder), 0, None, None, folder / "cache").folder


@pytest.fixture
def pairs(prepared: Path, tmp_path: Path) -> Pairs:
    copied = shutil.copytree(prepared, tmp_path / "data")
    return Pairs.of(PairSet.open(copied), PairsConfig(train="", max_tokens=200, max_prompt_tokens=100))


def test_every_pair_gets_its_own_back(pairs: Pairs) -> None:
    model, said = Model(), list[str]()
    ReferenceCache(pairs, "weights", "float32").fill(model, said.append)
    assert model.pairs == COUNT
    assert f"reference log-probs of {COUNT} pairs: {COUNT} computed in" in said[-1]
    again = ReferenceCache(pairs, "weights", "float32")
    assert again.missing() == []
    again.fill(model, said.append)
    assert model.pairs == COUNT
    assert "all from the cache" in said[-1]
    numbers = [COUNT - 1, 0, PART_PAIRS, PART_PAIRS - 1, 0]
    rows = pairs.rows(numbers)
    for got, want in zip(again.scores(numbers, rows), Model()(rows), strict=True):
        assert all(a.dtype == np.float32 and np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_only_a_few_parts_stay_in_memory(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PARTS_IN_MEMORY", 1)
    cache = ReferenceCache(pairs, "weights")
    cache.fill(Model(), lambda text: None)
    for number in (0, COUNT - 1, 0):
        (got,) = cache.scores([number], pairs.rows([number]))
        assert np.array_equal(got[0], Model()(pairs.rows([number]))[0][0])
    assert len(cache._parts) == 1


def test_it_goes_on_half_way(pairs: Pairs) -> None:
    """Broken off in the second part: the first is kept, and only the others are computed."""
    said: list[str] = []
    with pytest.raises(RunError, match="died"):
        ReferenceCache(pairs, "weights").fill(Model(broken_after=PART_PAIRS + 1), said.append)
    second = ReferenceCache(pairs, "weights")
    assert second.missing() == [1, 2]
    model = Model()
    second.fill(model, said.append)
    assert model.pairs == COUNT - PART_PAIRS
    assert "going on after 1 of 3 parts" in said[0]


def test_it_stops_where_it_is_asked_to(pairs: Pairs) -> None:
    answers = iter([False, True])
    with pytest.raises(StoppedEarly, match=f"{PART_PAIRS} of them new; start the run again"):
        ReferenceCache(pairs, "weights").fill(Model(), lambda text: None, lambda: next(answers))
    assert ReferenceCache(pairs, "weights").missing() == [1, 2]


def test_a_part_that_was_not_written_to_its_end_is_made_anew(pairs: Pairs) -> None:
    cache = ReferenceCache(pairs, "weights")
    cache.fill(Model(), lambda text: None)
    part = cache.folder / "part-000001.npz"
    part.write_bytes(part.read_bytes()[:-40])
    assert ReferenceCache(pairs, "weights").missing() == [1]
    assert not list(cache.folder.glob(".part*"))


def test_a_damaged_part_is_one_line(pairs: Pairs) -> None:
    cache = ReferenceCache(pairs, "weights")
    cache.fill(Model(), lambda text: None)
    part = cache.folder / "part-000000.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:300] + bytes([whole[300] ^ 255]) + whole[301:])  # in the middle of the numbers
    with pytest.raises(RunError, match=r"part-000000\.npz: the cached reference log-probs are damaged \(.*\); delete this file") as caught:
        ReferenceCache(pairs, "weights").scores([3], pairs.rows([3]))
    assert "\n" not in str(caught.value)
    shutil.copy(cache.folder / "part-000001.npz", part)  # another part's numbers
    numbers, damaged = range(PART_PAIRS), ReferenceCache(pairs, "weights")
    rows = pairs.rows(numbers)
    with pytest.raises(RunError, match="does not fit pair"):
        damaged.scores(numbers, rows)


def test_the_key_is_of_rows_weights_and_arithmetic(pairs: Pairs) -> None:
    shorter = Pairs.of(pairs.source, PairsConfig(train="", max_tokens=60, max_prompt_tokens=50))
    keys = {
        cache_key(pairs, "weights", "float32"),
        cache_key(pairs, "weights", "bfloat16"),
        cache_key(pairs, "other weights", "float32"),
        cache_key(shorter, "weights", "float32"),
        cache_key(pairs, "weights", "float32", {"tensor": 2}),
    }
    assert len(keys) == 5
    assert cache_key(pairs, "weights", "float32") in keys


def test_the_digest_sees_every_weight(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes([number]) * 100)
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first
    (tmp_path / "model-1.safetensors").write_bytes(bytes([1]) * 99 + b"x")
    second = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert len({first, second, weights_digest(tmp_path)}) == 3


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_computed(pairs: Pairs) -> None:
    folder = ReferenceCache(pairs, "weights").folder
    folder.rmdir()
    folder.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot be written to .*; copy the data to a folder that can be written, or use dpo.reference=live") as caught:
        ReferenceCache(pairs, "weights")
    assert "\n" not in str(caught.value)


def test_a_whole_cache_is_only_read(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a folder that others prepared, mounted without the right to write."""
    ReferenceCache(pairs, "weights").fill(Model(), lambda text: None)
    for name in ("mkdir", "open"):
        monkeypatch.setattr(Path, name, lambda *_, **__: pytest.fail("something was to be written"))
    cache, said = ReferenceCache(pairs, "weights"), list[str]()
    cache.fill(Model(broken_after=0), said.append)
    assert "all from the cache" in said[-1]
    assert len(cache.scores([1], pairs.rows([1]))) == 1


def test_a_disk_that_fills_up_is_one_line(pairs: Pairs) -> None:
    cache = ReferenceCache(pairs, "weights")
    cache.folder.rmdir()
    cache.folder.write_text("the folder is gone by now")
    with pytest.raises(RunError, match=r"cannot be written to .*; what was written before is kept") as caught:
        cache.fill(Model(), lambda text: None)
    assert "\n" not in str(caught.value)


def test_log_probs_that_are_no_numbers_are_not_kept(pairs: Pairs) -> None:
    def spoilt(rows: Sequence[TrainRow]) -> Scores:
        scores = Model()(rows)
        scores[3][1][0] = np.nan
        return scores

    cache = ReferenceCache(pairs, "weights")
    with pytest.raises(RunError, match=rf"not finite for 1 of {PART_PAIRS} pairs \(the first: row 3 of .*\): the reference's weights are damaged"):
        cache.fill(spoilt, lambda text: None)
    assert len(cache.missing()) == 3
