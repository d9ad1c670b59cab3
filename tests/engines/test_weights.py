"""Weights through shared memory: what is published is read, versions are kept apart, and dead drivers leave nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcli.engines import weights
from rlcli.engines.base import WeightHandle
from rlcli.engines.weights import SharedMemoryTransport, sweep
from rlcli.errors import RunError, UserError


def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(8, 4, generator=generator).to(torch.bfloat16 if i % 2 else torch.float32)) for i in range(5)]


def test_what_ranks_publish_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PART_BYTES", 200)  # several parts a writer
    driver = SharedMemoryTransport.create(root=tmp_path)
    first, second = tensors(1), [("head", torch.ones(3, 2).T)]
    files = [*SharedMemoryTransport(driver.folder).publish(4, first, writer=0), *SharedMemoryTransport(driver.folder).publish(4, second, writer=1)]
    assert len(files) > 3
    found = dict(driver.read(WeightHandle(4, tuple(files), tied_head=False)))
    assert found.keys() == {name for name, _ in first + second}
    for name, value in first + second:
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    driver.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_private_and_named_after_its_owner(tmp_path: Path) -> None:
    driver = SharedMemoryTransport.create(root=tmp_path)
    assert stat.S_IMODE(driver.folder.stat().st_mode) == 0o700
    assert driver.folder.name.startswith(f"msrl-weights-{os.getpid()}-")
    assert sweep(tmp_path) == [], "a living driver keeps its folder"
    driver.close()


def test_release_removes_that_version_and_older_ones(tmp_path: Path) -> None:
    driver = SharedMemoryTransport.create(root=tmp_path)
    files = {version: driver.publish(version, tensors(version)) for version in (1, 2, 3)}
    driver.release(2)
    assert [str(path) for path in driver.folder.glob("*.safetensors")] == files[3]
    with pytest.raises(RunError, match="version 1 cannot be read"):
        list(driver.read(WeightHandle(1, tuple(files[1]), tied_head=False)))
    with pytest.raises(RunError, match="holds version 3, not 2"):
        list(driver.read(WeightHandle(2, tuple(files[3]), tied_head=False)))


@pytest.mark.parametrize("number", ["its own", "another's"])
def test_a_dead_drivers_folder_is_swept_at_the_next_start(tmp_path: Path, number: str) -> None:
    code = "import sys, pathlib; from rlcli.engines.weights import *; print(SharedMemoryTransport.create(root=pathlib.Path(sys.argv[1])).folder)"
    made = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    folder = Path(made.stdout.strip())
    assert folder.is_dir()
    if number == "another's":  # the pid lives again, as another process with another start time
        folder = folder.rename(folder.with_name(f"msrl-weights-{os.getpid()}-1000-x"))
    driver = SharedMemoryTransport.create(root=tmp_path)
    assert [path for path in tmp_path.iterdir() if path != driver.folder] == []


def test_a_full_shared_memory_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"weight sync needs 1048576.00 GiB in .*enlarge it"):
        SharedMemoryTransport.create(need_bytes=1 << 50, root=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        SharedMemoryTransport.create(root=tmp_path / "absent")
    driver = SharedMemoryTransport.create(root=tmp_path)
    monkeypatch.setattr(weights, "_free", lambda folder: 100)
    with pytest.raises(RunError, match=r"weights of version 1 need .* which has 0.00 GiB free: enlarge it"):
        driver.publish(1, tensors(1))
    assert [path.name for path in driver.folder.iterdir()] == ["owner"], "nothing half-written"
