"""Periodic saves: what fails in writing is told and costs nothing more, a worker that is lost over it ends the run."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcli.checkpoint import disk
from rlcli.checkpoint.manifest import Manifest
from rlcli.config.schema import CheckpointConfig
from rlcli.errors import RunError, WorkerLost
from rlcli.trainers.saving import Saver, export_final, open_store


class Ranks:
    """What a Saver asks of the training ranks. `faults`: by method, what its next call raises."""

    what = ""

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}

    def save(self, folder: Path, asynchronous: bool, optimizer: bool) -> None:
        (folder / "weights").write_bytes(b"weights")
        self._answer("save")

    def saved(self, wait: bool) -> bool:
        self._answer("saved")
        return True

    def _answer(self, method: str) -> None:
        if fault := self.faults.pop(method, None):
            raise fault


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def saver(ranks: Ranks, told: list[str], tmp_path: Path) -> Iterator[Saver]:
    config = CheckpointConfig(asynchronous=True)
    with open_store(tmp_path, config, told.append) as store:
        yield Saver(store, ranks, config, told.append)  # type: ignore[arg-type]


def manifest(step: int) -> Manifest:
    return Manifest(kind="dapo", step=step, consumed=0, config={}, versions={}, layout={}, model={}, data={}, metrics={}, optimizer=True)


@pytest.mark.parametrize("method", ["save", "saved"])
def test_a_failed_write_is_told_and_the_next_save_is_complete(method: str, saver: Saver, ranks: Ranks, told: list[str], tmp_path: Path) -> None:
    ranks.faults[method] = RunError("step 1, save: train rank 0 failed: OSError: No space left on device")
    saver.try_save(manifest(1), {})
    saver.poll()
    assert told == ["the checkpoint of step 1 was not saved: step 1, save: train rank 0 failed: OSError: No space left on device"]
    saver.try_save(manifest(2), {})
    saver.wait()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize("method", ["save", "saved"])
def test_a_worker_lost_over_a_save_ends_the_run_and_leaves_no_part_of_it(method: str, saver: Saver, ranks: Ranks, told: list[str], tmp_path: Path) -> None:
    ranks.faults[method] = WorkerLost("step 1, save: train rank 0 died")

    def periodic() -> None:
        saver.try_save(manifest(1), {})
        saver.poll()

    with pytest.raises(WorkerLost, match="train rank 0 died"):
        periodic()
    assert told == []
    assert [path for path in tmp_path.rglob("*") if "0001" in path.name] == []
    saver.wait()  # the end of the run finds nothing more to wait for


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def full_for(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the very end of that step's save, which runs in the background."""
    rename = disk.rename

    def refusing(old: Path, new: Path) -> None:
        if new.name == f"step-{step:08d}":
            with disk.named("rename", old):
                raise OSError(errno.ENOSPC, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(disk, "rename", refusing)


def until_idle(saver: Saver) -> None:
    saver.poll()
    while saver.store.busy:
        time.sleep(0.01)
    saver.poll()


def test_a_save_that_fails_in_the_background_is_told_at_the_next_poll(saver: Saver, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_for(3, monkeypatch)
    saver.try_save(manifest(3), {})
    until_idle(saver)
    assert len(told) == 1
    assert told[0].startswith("the checkpoint of step 3 was not saved: checkpoint: cannot rename")
    assert saver.newest == -1
    saver.save(manifest(4), {})
    saver.wait()
    assert (names(tmp_path), len(told)) == (["step-00000004"], 1)


@pytest.mark.parametrize("periodic", [True, False])
def test_the_next_save_is_made_whatever_became_of_the_one_before(
    periodic: bool, saver: Saver, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_for(6, monkeypatch)
    saver.try_save(manifest(6), {})
    (saver.try_save if periodic else saver.save)(manifest(8), {})
    saver.wait()
    assert names(tmp_path) == ["step-00000008"]
    assert [text.partition(":")[0] for text in told] == ["the checkpoint of step 6 was not saved"]


def test_what_fails_while_training_goes_on_is_told_as_the_save(saver: Saver, ranks: Ranks, told: list[str]) -> None:
    saver.try_save(manifest(2), {})
    ranks.what = "step 3, update"
    asked = []
    ranks.saved = lambda wait: asked.append(ranks.what) or True  # type: ignore[method-assign, func-returns-value]
    saver.poll()
    assert (asked, ranks.what) == (["step 2, save"], "step 3, update")


def test_a_folder_made_read_only_meanwhile_costs_that_save_alone(saver: Saver, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refusing(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "model":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", refusing)
    saver.try_save(manifest(1), {})
    assert len(told) == 1
    assert "the checkpoint of step 1 was not saved: checkpoint: cannot make the folder" in told[0]
    assert "read-only file system" in told[0]


def test_what_ended_the_run_is_not_hidden_by_a_save_that_failed_beside_it(tmp_path: Path, ranks: Ranks, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full_for(1, monkeypatch)

    def run() -> None:
        with open_store(tmp_path, CheckpointConfig(), told.append) as store:
            saver = Saver(store, ranks, CheckpointConfig(), told.append)  # type: ignore[arg-type]
            saver.try_save(manifest(1), {})
            saver.poll()
            raise WorkerLost("step 2, update: train rank 0 died")

    with pytest.raises(WorkerLost, match="step 2, update"):
        run()
    assert "a checkpoint was not saved: checkpoint: cannot rename" in told[-1]


def test_half_an_exported_model_is_removed_and_the_one_before_stays(ranks: Ranks, tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()

    def export(folder: Path) -> None:
        half = folder.with_name(f"{folder.name}.partial")  # see HfWriter
        half.mkdir()
        (half / "half").write_bytes(b"half")
        raise RunError("export: train rank 0 failed: the disk is full")

    ranks.export = export  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="the disk is full"):
        export_final(ranks, final)  # type: ignore[arg-type]
    assert names(tmp_path) == ["final"]
