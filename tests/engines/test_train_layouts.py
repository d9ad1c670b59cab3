"""One gradient, whatever the layout: every way to cut, pack, share and spread a mini-batch gives what transformers gives for one response at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import LR, OPTIM, Job, RatioLoss, joined, per_response, run_jobs
from ranks import launch

from rlcli.types import TrainRow

pytestmark = pytest.mark.engine

STEPS = 3
SHAPES = ((11, (5, 1, 7)), (4, (3, 9)), (20, (2, 2)), (290, (300, 3, 40)), (7, (4,)), (11, (5, 1, 7)), (9, (6, 2)))


def make_rows(seed: int = 0) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for prompt, lengths in SHAPES:
        responses = [rng.integers(0, 256, length).astype(np.int32) for length in lengths]
        fields = {"advantage": [rng.normal(size=length).astype(np.float32) for length in lengths]}
        rows.append(TrainRow(rng.integers(0, 256, prompt).astype(np.int32), responses, fields))
    return rows


@dataclass
class Reference:
    logprobs: list[list[np.ndarray]]
    entropies: list[list[np.ndarray]]
    gradients: dict[str, np.ndarray]
    norm: float
    weights: dict[str, np.ndarray]  # after STEPS updates


def decays(name: str) -> bool:
    return not (name.endswith("norm.weight") or name.endswith(".bias"))


def reference(folder: Path, rows: list[TrainRow], loss: RatioLoss, temperature: float = 1.0, steps: int = STEPS) -> Reference:
    """transformers on one response at a time, no padding, torch's own AdamW and clipping."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays(n)], "weight_decay": OPTIM.weight_decay},
        {"params": [p for n, p in named.items() if not decays(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    first: Any = None
    for step in range(max(1, steps)):
        optimizer.zero_grad()
        measured = one_by_one(model, rows, loss, temperature)
        gradients = {n: p.grad.clone().numpy() for n, p in named.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.clip_grad))
        first = (*measured, gradients, norm) if step == 0 else first
        if steps:
            optimizer.step()
    return Reference(*first, weights={n: p.detach().numpy() for n, p in named.items()})


def one_by_one(model: Any, rows: list[TrainRow], loss: RatioLoss, temperature: float) -> tuple[list[Any], list[Any]]:
    """Log-probs and entropies; the gradient is left in the model."""
    logprobs: list[list[np.ndarray]] = []
    entropies: list[list[np.ndarray]] = []
    for row in rows:
        logprobs.append([])
        entropies.append([])
        for response, advantage in zip(row.responses, row.fields["advantage"], strict=True):
            ids = torch.from_numpy(np.concatenate([row.prompt, response]).astype(np.int64))[None]
            every = torch.log_softmax(model(ids).logits[0, len(row.prompt) - 1 : -1] / temperature, -1)
            chosen = every.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
            entropy = -(every.exp() * every).sum(-1)
            value = (torch.from_numpy(advantage) * torch.exp(chosen / 10)).sum() - loss.entropy_coef * entropy.sum()
            value.backward()
            logprobs[-1].append(chosen.detach().numpy())
            entropies[-1].append(entropy.detach().numpy())
    return logprobs, entropies


@pytest.fixture(scope="module")
def rows() -> list[TrainRow]:
    return make_rows()


@pytest.fixture(scope="module")
def expected(tiny_model_factory: Callable[..., Path], rows: list[TrainRow]) -> Callable[..., tuple[Path, Reference]]:
    """(folder, reference) of a kind of tiny model, worked out once."""
    known: dict[Any, tuple[Path, Reference]] = {}

    def get(kind: str, tie: bool, entropy_coef: float = 0.0, temperature: float = 1.0) -> tuple[Path, Reference]:
        key = (kind, tie, entropy_coef, temperature)
        if key not in known:
            folder = tiny_model_factory(kind, tie)
            known[key] = folder, reference(folder, rows, RatioLoss(entropy_coef), temperature)
        return known[key]

    return get


def nearly(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    """Equal up to the order of float32 sums: the difference's norm is small against the whole's."""
    return float(np.linalg.norm(got - want)) <= tolerance * float(np.linalg.norm(want)) + 1e-9


def check(answers: list[Any], name: str, want: Reference, rows: list[TrainRow]) -> None:
    """Log-probs, entropies, gradients, metrics and the weights after the updates are the reference's."""
    for key, values in (("logprobs", want.logprobs), ("entropies", want.entropies)):
        for got_row, want_row in zip(per_response(answers, name, key, rows), values, strict=True):
            for got, one in zip(got_row, want_row, strict=True):
                np.testing.assert_allclose(got, one, atol=1e-5, rtol=1e-5, err_msg=f"{name} {key}")
    gradients = joined(answers, name, "gradients")
    assert gradients.keys() == want.gradients.keys(), name
    wrong = [n for n, g in gradients.items() if not nearly(g, want.gradients[n], 2e-5)]
    assert not wrong, f"{name}: gradients of {wrong[:4]}"
    results = answers[0][name]["results"]
    if not results:
        return
    assert [answer[name]["results"][0].metrics for answer in answers] == [results[0].metrics] * len(answers)
    assert results[0].metrics["tokens"] == sum(len(r) for row in rows for r in row.responses)
    assert results[0].metrics["largest"] == max(float(a.max()) for row in rows for a in row.fields["advantage"])
    assert results[0].grad_norm == pytest.approx(want.norm, rel=1e-5)
    weights = joined(answers, name, "weights")
    wrong = [n for n, w in weights.items() if not np.allclose(w, want.weights[n], atol=2e-6, rtol=1e-5)]
    assert not wrong, f"{name}: weights of {wrong[:4]}, off by {[float(np.abs(weights[n] - want.weights[n]).max()) for n in wrong[:4]]}"


def test_one_rank_agrees_with_transformers(expected: Any, rows: list[TrainRow], tmp_path: Path) -> None:
    """Families, tied and untied heads, micro-batch budgets, prefix sharing, recomputation, small head chunks, entropy bonus, temperature."""
    llama, qwen2, qwen3 = (str(expected(*model)[0]) for model in (("llama", False), ("qwen2", True), ("qwen3", False)))
    warm = str(expected("llama", False, 0.05, 1.7)[0])
    jobs = {
        "llama": Job(llama, updates=STEPS),
        "llama-small": Job(llama, bound=633),
        "llama-unshared": Job(llama, bound=700, sharing="off"),
        "llama-entropy": Job(warm, loss=RatioLoss(0.05), options={"temperature": 1.7, "head_chunk_tokens": 37}, updates=STEPS),
        "llama-recompute": Job(llama, options={"recompute": True}, updates=1),
        "qwen2": Job(qwen2, updates=STEPS, options={"head_chunk_tokens": 50}),
        "qwen2-small": Job(qwen2, bound=633),
        "qwen3": Job(qwen3, updates=STEPS),
        "qwen3-unshared": Job(qwen3, bound=700, sharing="off"),
    }
    answers = launch(run_jobs, 1, tmp_path, jobs, rows)
    assert [len(answers[0][name]["packed"][0]) > 1 for name in ("llama", "llama-small", "llama-unshared")] == [False, True, True]
    for name, job in jobs.items():
        kind = name.split("-")[0]
        want = expected(kind, kind == "qwen2", job.loss.entropy_coef, job.options.get("temperature", 1.0))[1]
        if job.updates == 1:
            want = Reference(want.logprobs, want.entropies, want.gradients, want.norm, joined(answers, name, "weights"))
        check(answers, name, want, rows)


def test_two_ranks_agree_with_transformers(expected: Any, rows: list[TrainRow], tmp_path: Path) -> None:
    """Tensor, pipeline and data parallel; one data parallel rank with nothing to do."""
    llama, qwen2, qwen3 = (str(expected(*model)[0]) for model in (("llama", False), ("qwen2", True), ("qwen3", False)))
    jobs = {
        "llama-tp": Job(llama, tensor=2, updates=STEPS, options={"head_chunk_tokens": 100}),
        "qwen2-tp": Job(qwen2, tensor=2, bound=700, updates=STEPS),
        "qwen3-tp": Job(qwen3, tensor=2, updates=STEPS),
        "llama-pp": Job(llama, pipeline=2, bound=633, updates=STEPS),
        "qwen2-pp": Job(qwen2, pipeline=2, bound=700, updates=STEPS),
        "llama-dp": Job(llama, bound=633, updates=STEPS),
        "qwen2-dp": Job(qwen2, updates=STEPS),
        "qwen3-dp": Job(qwen3, bound=700, sharing="off"),
    }
    answers = launch(run_jobs, 2, tmp_path, jobs, rows)
    for name in jobs:
        kind = name.split("-")[0]
        check(answers, name, expected(kind, kind == "qwen2")[1], rows)


def test_four_ranks_agree_with_transformers(expected: Any, rows: list[TrainRow], tmp_path: Path) -> None:
    """Two kinds of parallelism at once, and more tensor ranks than key-value heads."""
    llama, qwen2 = (str(expected(*model)[0]) for model in (("llama", False), ("qwen2", True)))
    jobs = {
        "llama-tp-pp": Job(llama, tensor=2, pipeline=2, bound=700, updates=STEPS),
        "qwen2-tp-pp": Job(qwen2, tensor=2, pipeline=2, bound=700, updates=STEPS),
        "qwen2-dp-pp": Job(qwen2, pipeline=2, bound=633, updates=STEPS),
        "qwen2-dp-tp": Job(qwen2, tensor=2, bound=700, updates=STEPS),
        "llama-tp4": Job(llama, tensor=4, updates=STEPS),
    }
    answers = launch(run_jobs, 4, tmp_path, jobs, rows)
    for name in jobs:
        kind = name.split("-")[0]
        check(answers, name, expected(kind, kind == "qwen2")[1], rows)


def test_a_data_parallel_rank_without_work_takes_part(expected: Any, rows: list[TrainRow], tmp_path: Path) -> None:
    """One row on two data parallel ranks: the second computes nothing, and ends with the same weights."""
    folder, _ = expected("llama", False)
    want = reference(folder, rows[:1], RatioLoss())
    answers = launch(run_jobs, 2, tmp_path, {"one": Job(str(folder), updates=STEPS)}, rows[:1])
    assert [len(share) for share in answers[0]["one"]["packed"]] == [1, 0]
    check(answers, "one", want, rows[:1])
