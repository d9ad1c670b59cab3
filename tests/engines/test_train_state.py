"""What a rank keeps: updates that are refused or empty change nothing, saves load at any layout, repeats are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import LR, Job, RatioLoss, joined, make_rank, share_of, weights_of
from ranks import launch
from test_train_layouts import make_rows

from rlcli.algorithms.base import LossOutput, Tokens
from rlcli.types import TrainRow

pytestmark = pytest.mark.engine


@dataclass
class BrokenLoss(RatioLoss):
    """Not a number where it is told to be: the value, or only the gradient."""

    where: str = "value"

    def __call__(self, tokens: Tokens) -> LossOutput:
        out = super().__call__(tokens)
        if self.where == "value":
            return LossOutput(out.loss * float("inf"), out.sums)
        root = torch.sqrt(tokens.logprobs_N[:1].sum() * 0.0)  # 0, but its derivative is infinite times 0
        return LossOutput(out.loss + root, out.sums)


def equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(left[n].tobytes() == right[n].tobytes() for n in left)


def refuse_then_learn(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow]) -> dict[str, Any]:
    train = make_rank(job, rank, world, folder, "refuse")
    mine, _ = share_of(job, rows, rank, world)
    out: dict[str, Any] = {"before": weights_of(train)}
    out["refused"] = [train.update(mine, BrokenLoss(where=where), LR) for where in ("value", "gradient")]
    silent = [TrainRow(row.prompt, row.responses, {**row.fields, "weight": [np.zeros_like(a) for a in row.fields["advantage"]]}) for row in rows]
    out["empty"] = [train.update(share_of(job, silent, rank, world)[0], job.loss, LR), train.update([], job.loss, LR)]
    out["after"] = weights_of(train)
    out["learnt"] = train.update(mine, job.loss, LR)
    out["weights"] = weights_of(train)
    train.close()
    fresh = make_rank(job, rank, world, folder, "fresh")
    out["fresh"] = fresh.update(mine, job.loss, LR)
    out["fresh_weights"] = weights_of(fresh)
    fresh.close()
    return out


def test_refused_and_empty_updates_leave_everything_as_it_was(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> None:
    """On two data parallel ranks; the update after them equals the first update of a fresh start, so the optimizer is untouched too."""
    rows = make_rows()[:3]
    answers = launch(refuse_then_learn, 2, tmp_path, Job(str(tiny_model_factory("llama", True))), rows)
    for answer in answers:
        assert [result.skipped for result in answer["refused"]] == [True, True]
        assert [(result.empty, result.skipped, result.tokens) for result in answer["empty"]] == [(True, False, 0)] * 2
        assert not answer["learnt"].skipped
        assert answer["learnt"].grad_norm == answer["fresh"].grad_norm
    assert equal(answers[0]["before"], answers[0]["after"])
    assert not equal(answers[0]["after"], answers[0]["weights"])
    assert equal(answers[0]["weights"], answers[0]["fresh_weights"])


def save_and_go_on(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow], asynchronous: bool) -> dict[str, Any]:
    train = make_rank(job, rank, world, folder, "save")
    mine, _ = share_of(job, rows, rank, world)
    for _ in range(2):
        train.update(mine, job.loss, LR)
    saved = folder / "state"
    if rank == 0:
        saved.mkdir()
    train.share(None)
    train.save(saved, asynchronous)
    results = [train.update(mine, job.loss, LR) for _ in range(2)]
    assert train.save_finished(wait=True)
    out = {"go": {"weights": weights_of(train), "results": results}}
    train.close()
    return out


def load_and_go_on(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow], saved: Path) -> dict[str, Any]:
    train = make_rank(job, rank, world, folder, "load")
    mine, _ = share_of(job, rows, rank, world)
    train.load(saved)
    results = [train.update(mine, job.loss, LR) for _ in range(2)]
    out = {"go": {"weights": weights_of(train), "results": results}}
    train.close()
    return out


@pytest.mark.parametrize(
    ("written", "read", "asynchronous"),
    [((1, 1, 1), (2, 1, 2), False), ((2, 2, 1), (2, 2, 1), True), ((2, 1, 2), (2, 1, 1), True), ((3, 1, 1), (2, 2, 1), True)],
    ids=["one-to-pp2", "tp2-to-tp2", "pp2-to-dp2", "dp3-to-tp2"],
)
def test_training_goes_on_from_a_save(
    tiny_model_factory: Callable[..., Path], tmp_path: Path, written: tuple[int, int, int], read: tuple[int, int, int], asynchronous: bool
) -> None:
    """Layouts are (ranks, TP, PP). At the same layout the weights are the same bits, at another the same up to the order of sums."""
    rows = make_rows()[:3]
    job = Job(str(tiny_model_factory("qwen2", True)), tensor=written[1], pipeline=written[2], bound=400, options={"deterministic": True})
    rows = [replace(row, responses=[r[:50] for r in row.responses], fields={"advantage": [a[:50] for a in row.fields["advantage"]]}) for row in rows]
    went_on = launch(save_and_go_on, written[0], tmp_path / "written", job, rows, asynchronous)
    again = replace(job, tensor=read[1], pipeline=read[2])
    resumed = launch(load_and_go_on, read[0], tmp_path / "read", again, rows, tmp_path / "written" / "state")
    want, got = joined(went_on, "go", "weights"), joined(resumed, "go", "weights")
    assert got.keys() == want.keys()
    if written == read:
        assert equal(got, want)
    for name, weight in want.items():
        np.testing.assert_allclose(got[name], weight, atol=2e-6, rtol=1e-5, err_msg=name)


def repeat(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow], name: str) -> dict[str, Any]:
    train = make_rank(job, rank, world, folder, name)
    mine, _ = share_of(job, rows, rank, world)
    logprobs = train.logprobs(mine)
    results = [train.update(mine, job.loss, LR) for _ in range(3)]
    exported = folder / f"model-{name}"
    train.export(exported)
    out = {"weights": weights_of(train), "norms": [r.grad_norm for r in results], "metrics": [r.metrics for r in results], "logprobs": logprobs}
    train.close()
    return out


def repeat_twice(rank: int, world: int, folder: Path, job: Job, rows: list[TrainRow]) -> list[dict[str, Any]]:
    return [repeat(rank, world, folder, job, rows, name) for name in ("first", "second")]


def test_bfloat16_repeats_bit_for_bit_and_exports_what_it_learnt(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> None:
    """Two tensor ranks, bfloat16 with float32 master weights, several micro-batches: twice the same bits, near to float32, and an HF folder of them."""
    import transformers

    rows = make_rows()
    folder = tiny_model_factory("llama", False)
    job = Job(str(folder), tensor=2, bound=700, options={"deterministic": True, "dtype": "bfloat16"})
    answers = launch(repeat_twice, 2, tmp_path, job, rows)
    first, second = answers[0]
    assert equal(first["weights"], second["weights"])
    assert (first["norms"], first["metrics"]) == (second["norms"], second["metrics"])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first["logprobs"][0], second["logprobs"][0], strict=True))
    exact = launch(repeat_twice, 1, tmp_path / "exact", Job(str(folder)), rows)[0][0]
    # Rounding each operation to 8 bits shifts a log-prob of this model by a few hundredths, and a norm by a few hundredths of itself.
    assert first["norms"][0] == pytest.approx(exact["norms"][0], rel=0.05)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model-second", dtype=torch.bfloat16)
    assert equal({name: weight.detach().float().numpy() for name, weight in loaded.named_parameters()}, second["weights"])
