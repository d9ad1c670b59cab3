"""Periodic saves: what fails in writing is told and costs nothing more, a worker that is lost over it ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.checkpoint.manifest import Manifest
from rlcli.config.schema import CheckpointConfig
from rlcli.errors import RunError, WorkerLost
from rlcli.trainers.saving import Saver, open_store


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
