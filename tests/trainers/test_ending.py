"""How a run ends when its last save fails: the trained model is kept, and the message says what is left."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.checkpoint import disk
from rlcli.checkpoint.manifest import Manifest
from rlcli.config.load import load
from rlcli.config.schema import CheckpointConfig
from rlcli.errors import MsrlError, RunError, StoppedEarly, UserError, WorkerLost
from rlcli.trainers.loop import Loop
from rlcli.trainers.saving import Saver, open_store


class Ranks:
    """Training ranks that write a file. `full`: what the disk has no room for."""

    what = ""

    def __init__(self, full: set[str]) -> None:
        self.full = full

    def save(self, folder: Path, asynchronous: bool, optimizer: bool) -> None:
        self._room("save")
        (folder / "weights").write_bytes(b"weights")

    def saved(self, wait: bool) -> bool:
        return True

    def export(self, folder: Path) -> None:
        self._room("export")
        folder.mkdir()

    def _room(self, what: str) -> None:
        if f"{what} lost" in self.full:
            raise WorkerLost(f"{what}: train rank 0 died")
        if f"{what} read-only" in self.full:
            raise UserError("the folder is read-only")
        if what in self.full:
            raise RunError(f"{what}: train rank 0: the disk is full")


class Short(Loop):
    """A run of two steps that learns nothing."""

    kind = "dapo"
    place: Any = SimpleNamespace(taken=0)
    data_state: Any = None

    def train(self) -> None:
        self.step = 2
        self.save_last()

    def restore(self, checkpoint: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        return {}

    def manifest(self) -> Manifest:
        return Manifest(kind="dapo", step=self.step, consumed=0, config={}, versions={}, layout={}, model={}, data={}, metrics={}, optimizer=True)


def ended(tmp_path: Path, full: set[str], stop_at: int = 0, give_up: bool = False) -> tuple[MsrlError | None, list[str]]:
    """How the run ended, and what it left."""
    told: list[str] = []
    run = SimpleNamespace(path=tmp_path, final=tmp_path / "final", console=SimpleNamespace(info=told.append, warn=told.append))
    config = load("dapo", None, ["model=m", "data.train=d", "train.steps=2", "train.max_nonfinite=1"]).config
    error = None
    with open_store(tmp_path / "checkpoints", CheckpointConfig(), told.append) as store:
        parts = SimpleNamespace(run=run, trainer=Ranks(full), stopper=None)
        parts.saver = Saver(store, parts.trainer, CheckpointConfig(), told.append)  # type: ignore[arg-type]
        loop = Short(config, parts, 2)  # type: ignore[arg-type]
        try:
            if stop_at:
                loop.step = stop_at
                parts.saver.try_save(loop.manifest(), {})
                loop.stop("signal SIGTERM")
            if give_up:
                loop.count_skipped("the loss is not finite")
            loop.complete(None)
        except MsrlError as fault:
            error = fault
    return error, sorted(path.name for path in [*tmp_path.iterdir(), *(tmp_path / "checkpoints").iterdir()] if path.name not in (".lock", "checkpoints"))


def test_a_run_ends_well(tmp_path: Path) -> None:
    assert ended(tmp_path, set()) == (None, ["final", "step-00000002"])


@pytest.mark.parametrize("fault", ["save", "save read-only"])
def test_without_the_last_checkpoint_the_trained_model_is_kept(fault: str, tmp_path: Path) -> None:
    error, left = ended(tmp_path, {fault})
    assert type(error) is RunError  # exit code 1, and what resumes is added to it
    assert str(error).startswith(f"the trained model is in {tmp_path / 'final'}; the checkpoint of step 2 was not saved: ")
    assert left == ["final"]


def test_where_neither_fits_both_are_said(tmp_path: Path) -> None:
    error, left = ended(tmp_path, {"save", "export"})
    assert str(error).splitlines() == [
        "the checkpoint of step 2 was not saved: save: train rank 0: the disk is full",
        "the trained model was not saved either: export: train rank 0: the disk is full",
    ]
    assert left == []


def test_without_the_trained_model_the_checkpoint_is_kept(tmp_path: Path) -> None:
    error, left = ended(tmp_path, {"export"})
    assert str(error) == "the trained model was not saved: export: train rank 0: the disk is full"
    assert left == ["step-00000002"]


def test_a_worker_lost_in_the_last_save_ends_the_run(tmp_path: Path) -> None:
    error, left = ended(tmp_path, {"save lost"})
    assert isinstance(error, WorkerLost)
    assert left == []


def test_a_stop_whose_checkpoint_failed_in_the_background_saves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, failures = disk.rename, [OSError(errno.ENOSPC, "No space left on device")]

    def refusing(old: Path, new: Path) -> None:
        with disk.named("rename", old):
            if failures:
                raise failures.pop()
        rename(old, new)

    monkeypatch.setattr(disk, "rename", refusing)
    error, left = ended(tmp_path, set(), stop_at=1)
    assert isinstance(error, StoppedEarly)
    assert left == ["step-00000001"]


def test_a_stop_that_cannot_save_says_so(tmp_path: Path) -> None:
    error, left = ended(tmp_path, {"save"}, stop_at=1)
    assert str(error) == "the checkpoint of step 1 was not saved: save: train rank 0: the disk is full"
    assert (type(error), left) == (RunError, [])


def test_a_run_given_up_says_why_also_where_it_cannot_save(tmp_path: Path) -> None:
    error, _ = ended(tmp_path, {"save"}, give_up=True)
    assert str(error) == "the loss is not finite. 1 in a row, train.max_nonfinite=1; the checkpoint of step 0 was not saved: save: train rank 0: the disk is full"
