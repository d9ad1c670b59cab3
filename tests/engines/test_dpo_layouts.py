"""The gradient of DPO through the real engine: the same at every layout, packing and sharing, and what transformers gives for one answer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_jobs import Job, joined, per_response, run_jobs
from ranks import launch
from test_train_layouts import nearly

from rlcli.algorithms.dpo import DpoLoss, summarise
from rlcli.types import TrainRow

pytestmark = pytest.mark.engine

SHAPES = ((12, 7, 3), (5, 1, 9), (30, 20, 20), (290, 40, 300), (8, 2, 2))  # tokens of prompt, chosen, rejected
BETA, SFT = 0.3, 0.2


def make_pairs() -> list[TrainRow]:
    """Random tokens, masks and reference; in the first pair the loss covers all but two tokens of the chosen answer."""
    rng = np.random.default_rng(3)
    rows = []
    for prompt, *lengths in SHAPES:
        answers = [rng.integers(0, 256, length).astype(np.int32) for length in lengths]
        masks = [np.ones(length, np.float32) for length in lengths]
        reference = [rng.normal(-5.5, 0.5, length).astype(np.float32) for length in lengths]
        rows.append(TrainRow(rng.integers(0, 256, prompt).astype(np.int32), answers, {"mask": masks, "ref_logprobs": reference}, splittable=False))
    rows[0].fields["mask"][0][2:4] = 0
    return rows


def by_transformers(folder: Path, rows: list[TrainRow]) -> tuple[float, dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Mean over pairs of -log sigmoid(beta (c - r)) + SFT x NLL a token of the chosen answer: its value, gradient, and the log-probs."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    logprobs: list[list[np.ndarray]] = []
    for row in rows:
        ratios, sums, every = [], [], []
        for answer, mask, reference in zip(row.responses, row.fields["mask"], row.fields["ref_logprobs"], strict=True):
            ids = torch.from_numpy(np.concatenate([row.prompt, answer]).astype(np.int64))[None]
            predicted = torch.log_softmax(model(ids).logits[0, len(row.prompt) - 1 : -1], -1)
            values = predicted.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
            covered = torch.from_numpy(mask)
            ratios.append(((values - torch.from_numpy(reference)) * covered).sum())
            sums.append((values * covered).sum())
            every.append(values.detach().numpy())
        logprobs.append(every)
        loss = (-F.logsigmoid(BETA * (ratios[0] - ratios[1])) - SFT * sums[0] / float(row.fields["mask"][0].sum())) / len(rows)
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}, logprobs


def test_one_gradient_at_every_layout(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> None:
    rows = make_pairs()
    folder = tiny_model_factory("qwen2", True)
    loss = DpoLoss(beta=BETA, sft_coef=SFT, pairs=len(rows))
    value, gradients, logprobs = by_transformers(folder, rows)
    single = {
        "all": Job(str(folder), loss=loss, updates=1),
        "micro-batches": Job(str(folder), bound=630, loss=loss, updates=1),
        "unshared": Job(str(folder), bound=920, sharing="off", loss=loss, updates=1),
        "small chunks": Job(str(folder), loss=loss, updates=1, options={"head_chunk_tokens": 17}),
        "recomputed": Job(str(folder), loss=loss, updates=1, options={"recompute": True}),
    }
    double = {
        "DP": Job(str(folder), bound=920, loss=loss, updates=1),
        "TP": Job(str(folder), tensor=2, bound=700, loss=loss, updates=1),
        "PP": Job(str(folder), pipeline=2, bound=630, sharing="on", loss=loss, updates=1),
    }
    for world, jobs in ((1, single), (2, double)):
        answers = launch(run_jobs, world, tmp_path / str(world), jobs, rows)
        for name in jobs:
            got = joined(answers, name, "gradients")
            assert got.keys() == gradients.keys(), name
            assert [n for n in got if not nearly(got[n], gradients[n], 2e-5)] == [], name
            for row, want in zip(per_response(answers, name, "logprobs", rows), logprobs, strict=True):
                assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(row, want, strict=True)), name
            measured = summarise(answers[0][name]["results"][0].metrics)
            assert measured["loss"] == pytest.approx(value, rel=1e-5), name
            assert measured["pairs"] == len(rows)
            assert measured["tokens_chosen"] == pytest.approx((7 - 2 + 1 + 20 + 40 + 2) / 5), name
    counts = {name: sum(len(share) for share in answers[0][name]["packed"]) for name in double}
    assert min(counts.values()) > 1  # micro-batches were really cut


def test_before_the_first_update_nothing_differs(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> None:
    """The reference given is that of another packing (pairs two by two): it is off by rounding at most, and loss and margins are exact."""
    rows = [TrainRow(row.prompt, row.responses, {"mask": row.fields["mask"]}, splittable=False) for row in make_pairs()]
    folder = str(tiny_model_factory("llama"))
    answers = launch(run_jobs, 1, tmp_path / "reference", {"unshared": Job(folder, bound=920, sharing="off", loss=DpoLoss(losses=("simpo",)))}, rows)
    reference = per_response(answers, "unshared", "logprobs", rows)
    given = [TrainRow(row.prompt, row.responses, {**row.fields, "ref_logprobs": values}, False) for row, values in zip(rows, reference, strict=True)]
    jobs = {
        "first": Job(folder, updates=1, loss=DpoLoss(pairs=len(rows), reference_is_current=True)),
        "cached": Job(folder, updates=1, loss=DpoLoss(pairs=len(rows))),
    }
    answers = launch(run_jobs, 1, tmp_path / "update", jobs, given)
    first, cached = (summarise(answers[0][name]["results"][0].metrics) for name in jobs)
    assert first["loss"] == np.float32(math.log(2))
    assert (first["margin"], first["reward_chosen"], first["kl"], first["accuracy"]) == (0.0, 0.0, 0.0, 0.5)
    assert 0 <= first["reference_gap"] < 2e-6
    assert cached["margin"] == pytest.approx(0.0, abs=1e-5)
    ours, theirs = (joined(answers, name, "gradients") for name in jobs)
    assert all(nearly(ours[name], theirs[name], 2e-5) for name in ours)  # and learns the same from them
    other = per_response(answers, "first", "logprobs", rows)
    differences = [abs(a - b)[mask > 0] for row, x, y in zip(rows, reference, other, strict=True) for mask, a, b in zip(row.fields["mask"], x, y, strict=True)]
    assert first["reference_gap"] == pytest.approx(float(np.concatenate(differences).mean()), rel=1e-3, abs=1e-12)
