"""Checkpoints of Megatron's format that would run code are refused before they are loaded."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rlcli.checkpoint.trusted import refuse_code
from rlcli.errors import UserError


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path, call=os.mkdir):
        self.path, self.call = str(path), call

    def __reduce__(self):
        return self.call, (self.path,)


def save(folder, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(4), "b": torch.ones(2, dtype=torch.bfloat16), "opt": {"step": 3}, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def test_an_honest_one_passes(tmp_path):
    refuse_code(save(tmp_path / "a", extra=(1, "x", torch.arange(3))))


@pytest.mark.parametrize("call", [os.mkdir, torch.load, eval])
def test_an_index_that_calls_something(tmp_path, call):
    folder, proof = save(tmp_path / "a"), tmp_path / "proof"
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = Evil(proof, call)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"\.metadata: calls .*(mkdir|load|eval)"):
        refuse_code(folder)
    assert not proof.exists()


def test_an_object_that_calls_something(tmp_path):
    proof = tmp_path / "proof"
    folder = save(tmp_path / "a", extra=Evil(proof))
    with pytest.raises(UserError, match=r"__0_0\.distcp: an object at byte \d+ is refused"):
        refuse_code(folder)
    assert not proof.exists()
    with warnings.catch_warnings():  # the danger is real: this is what loading does
        warnings.simplefilter("ignore")
        dcp.load({"extra": None}, checkpoint_id=folder, no_dist=True)
    assert proof.exists()


@pytest.mark.parametrize("place", ["../other.distcp", "/etc/passwd"])
def test_an_index_that_points_outside(tmp_path, place):
    folder = save(tmp_path / "a")
    index = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="points outside"):
        refuse_code(folder)


def test_torn_and_foreign_indexes(tmp_path):
    folder = save(tmp_path / "a")
    whole = (folder / ".metadata").read_bytes()
    for data in (whole[: len(whole) // 2], b"", pickle.dumps({"a": 1})):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(UserError, match=r"\.metadata: (cannot be read|is not the index)"):
            refuse_code(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(UserError, match="No such file"):
        refuse_code(folder)
