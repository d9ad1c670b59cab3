"""A run may be stopped, and saved, before its first update: there is nothing yet that Megatron would find to save of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import LR, Job, make_rank, share_of, weights_of
from ranks import launch
from test_train_layouts import make_rows

from rlcli.types import TrainRow

pytestmark = pytest.mark.engine


def save_then_learn(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow]) -> dict[str, Any]:
    """Weights after one update: of a fresh rank, of one that was saved before, and of one that loaded what was saved."""
    saved = folder / "saved"
    saved.mkdir()
    out = {}
    for name in ("fresh", "saved", "loaded"):
        train = make_rank(job, rank, world, folder, name)
        if name == "saved":
            train.save(saved)
        if name == "loaded":
            train.load(saved)
        train.update(share_of(job, rows, rank, world)[0], job.loss, LR)
        out[name] = weights_of(train)
        train.close()
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_saved_before_its_first_update_goes_on_as_if_it_were_not(tiny_model_factory: Callable[..., Path], tmp_path: Path, dtype: str) -> None:
    job = Job(str(tiny_model_factory("qwen2")), options={"dtype": dtype})
    (out,) = launch(save_then_learn, 1, tmp_path, job, make_rows())
    for name in ("saved", "loaded"):
        assert out[name].keys() == out["fresh"].keys()
        assert all(out[name][key].tobytes() == out["fresh"][key].tobytes() for key in out["fresh"]), name
