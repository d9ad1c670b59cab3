"""Compare the preference losses, values and gradients, with TRL's own loss code on random pairs.

    python scripts/compare_trl.py --python VENV/bin/python     # a virtual environment that has trl and torch

TRL computes its losses inside the trainer, so its method runs here on a bare object that has just the attributes it reads.
The last line is `largest relative difference X`; the exit status is 1 where that is above the tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

TOLERANCE = 2e-5  # float32 sums over up to 60 tokens
PAIRS, LONGEST = 16, 60
CASES: list[dict] = [
    *({"losses": (name,)} for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")),
    *({"losses": (name,)} for name in ("aot", "aot_unpaired", "simpo", "orpo")),
    *({"losses": (name,), "label_smoothing": 0.1} for name in ("robust", "exo_pair", "aot", "aot_unpaired", "simpo")),
    *({"losses": ("sigmoid",), "divergence": name} for name in ("forward_kl", "js", "alpha")),
    *({"losses": ("ipo",), "divergence": name} for name in ("forward_kl", "js", "alpha")),
    {"losses": ("simpo",), "margin": 0.5},
    {"losses": ("sigmoid",), "ld_alpha": 0.3},
    {"losses": ("sigmoid", "hinge", "sppo_hard"), "weights": (1.0, 0.5, 0.2)},
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter of an environment with trl; none: this one")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.python:
        os.execv(asked.python, [asked.python, __file__, "--seed", str(asked.seed)])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    generator = torch.Generator().manual_seed(asked.seed)
    worst = 0.0
    print(f"{'losses and settings':<70}{'ours':>12}{'TRL':>12}{'value':>10}{'gradient':>10}")
    for case in CASES:
        batch = Batch(generator)
        ours, our_grad = batch.ours(case)
        theirs, their_grad = batch.theirs(case)
        value = abs(ours - theirs) / max(abs(theirs), 1e-8)
        gradient = ((our_grad - their_grad).norm() / their_grad.norm().clamp(min=1e-12)).item()
        worst = max(worst, value, gradient)
        print(f"{describe(case):<70}{ours:>12.6f}{theirs:>12.6f}{value:>10.1e}{gradient:>10.1e}")
    print(f"largest relative difference {worst:.1e}")
    return int(worst > TOLERANCE)


def describe(case: dict) -> str:
    return "  ".join(f"{name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in case.items())


class Batch:
    """Random pairs: per-token log-probs under policy and reference, [2 x PAIRS, LONGEST], chosen first, as TRL has them."""

    def __init__(self, generator) -> None:
        import torch

        self.torch = torch
        self.lengths = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=generator)
        self.mask = torch.arange(LONGEST)[None] < self.lengths[:, None]
        self.policy = (-3 * torch.rand(2 * PAIRS, LONGEST, generator=generator)) * self.mask
        self.reference = (self.policy + 0.3 * torch.randn(2 * PAIRS, LONGEST, generator=generator)).clamp(max=0) * self.mask

    def ours(self, case: dict):
        import numpy as np

        from rlcli.algorithms.dpo import DpoLoss
        from rlcli.algorithms.pairs import tokens_of
        from rlcli.types import TrainRow

        loss = DpoLoss(**{"pairs": PAIRS, **case})
        order = [(i, PAIRS + i) for i in range(PAIRS)]
        cut = lambda values, s: values[s, : self.lengths[s]].detach().numpy()  # noqa: E731
        rows = [
            TrainRow(np.zeros(1, np.int32), [np.zeros(int(self.lengths[s]), np.int32) for s in pair], {"ref_logprobs": [cut(self.reference, s) for s in pair]})
            for pair in order
        ]
        if "bco_pair" in loss.losses:  # TRL leaves the shift out
            rows = [TrainRow(r.prompt, r.responses, {**r.fields, "bco_pair_batch": [np.zeros(len(x), np.float32) for x in r.responses]}) for r in rows]
        elif loss.needs_gather:
            rows = loss.gathered(rows, [[cut(self.policy, s) for s in pair] for pair in order])
        tokens = tokens_of(rows, [[cut(self.policy, s) for s in pair] for pair in order])
        policy = self.policy.clone().requires_grad_()
        tokens.logprobs_N = self.torch.cat([policy[s, : self.lengths[s]] for pair in order for s in pair])
        value = loss(tokens).loss
        return value.item(), self.torch.autograd.grad(value, policy)[0]

    def theirs(self, case: dict):
        policy = self.policy.clone().requires_grad_()
        name = case["losses"][0]
        run = {"simpo": self._cpo, "orpo": self._orpo}.get(name, self._dpo)
        value = run(policy * self.mask, case)
        return value.item(), self.torch.autograd.grad(value, policy)[0]

    def _dpo(self, policy, case: dict):
        from trl.trainer.dpo_trainer import DPOTrainer

        torch, ld = self.torch, case.get("ld_alpha")
        reference = self.reference
        if ld is not None:
            shared = torch.minimum(self.lengths[:PAIRS], self.lengths[PAIRS:]).repeat(2)
            reference = torch.where(torch.arange(LONGEST)[None] < shared[:, None], reference, ld * reference)
        ref_sums = reference.sum(1)
        blank = torch.zeros(2 * PAIRS, LONGEST)
        outputs = SimpleNamespace(log_probs=policy, entropy=blank, mean_logits=blank, is_top1=blank.bool())
        same = lambda values: values  # noqa: E731
        divergence = {"js": "js_divergence", "alpha": "alpha_divergence"}.get(case.get("divergence", ""), case.get("divergence", "reverse_kl"))
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True), accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same), args=SimpleNamespace(discopop_tau=0.05),
            aux_loss_enabled=False, use_weighting=False, ld_alpha=ld, precompute_ref_logps=True, beta=0.1, label_smoothing=case.get("label_smoothing", 0.0),
            f_divergence_type=divergence, f_alpha_divergence_coef=0.5, loss_types=list(case["losses"]), loss_weights=list(case.get("weights", (1.0,))),
            _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        )  # fmt: skip
        mask = torch.cat([torch.zeros(2 * PAIRS, 1), self.mask], 1).long()
        inputs = {
            "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
            "ref_chosen_logps": ref_sums[:PAIRS], "ref_rejected_logps": ref_sums[PAIRS:],
        }  # fmt: skip
        return DPOTrainer._compute_loss(trainer, lambda **given: outputs, inputs, False)

    def _averages(self, policy):
        means = policy.sum(1) / self.lengths
        return means[:PAIRS], means[PAIRS:]

    def _cpo(self, policy, case: dict):
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        trainer = SimpleNamespace(
            alpha=0.0, beta=0.1, loss_type="simpo", simpo_gamma=case.get("margin", 0.0), label_smoothing=case.get("label_smoothing", 0.0),
            accelerator=SimpleNamespace(device="cpu"),
        )  # fmt: skip
        return CPOTrainer.cpo_loss(trainer, *self._averages(policy))[0].mean()

    def _orpo(self, policy, case: dict):
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        chosen, rejected = self._averages(policy)
        trainer = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
        return -chosen.mean() - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()


if __name__ == "__main__":
    sys.exit(main())
