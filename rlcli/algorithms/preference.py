"""The preference losses: one small function each, from what is known of the pairs to a loss a pair, [B].

Notation: c and r are the log-ratios log(policy / reference) of the chosen and the rejected answer, beta the strength of the reference,
z = beta (s_c - s_r) - margin, where s is c or r, or f'(ratio) of another f-divergence. e is the label smoothing.
With per-token log-probs (see `Rule.per_token`) c and r are divided by the answers' lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

DISCOPOP_TAU = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """What a loss function sees, each [B]; and its settings."""

    z: Tensor
    chosen_ratios: Tensor
    rejected_ratios: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_nll: Tensor  # negative log-likelihood a token of the chosen answer
    beta: float
    smoothing: float
    batch: tuple[Tensor, Tensor] | None = None  # what `Rule.gather` found over the whole mini-batch, for chosen and rejected answers

    @property
    def others(self) -> tuple[Tensor, Tensor]:
        assert self.batch is not None, "this loss needs what was gathered over the mini-batch"
        return self.batch


Gather = Callable[[Seen], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A loss function and which settings have a meaning for it.

    gather: for losses that depend on the mini-batch as a whole. From all its pairs, under the weights that the update starts from and
    without gradient, it finds one value for each chosen and one for each rejected answer. Given those, the loss is a sum over pairs
    again, with the gradient of the whole.
    """

    function: Callable[[Seen], Tensor]
    reference: bool = True
    per_token: bool = False  # divide log-probs by the answer's length unless a setting says otherwise
    divergences: bool = False
    margins: bool = False
    smoothed: bool = False
    gather: Gather | None = None


def smooth_logistic(z: Tensor, smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z)."""
    loss = -F.logsigmoid(z)
    return loss if smoothing == 0.0 else (1.0 - smoothing) * loss - smoothing * F.logsigmoid(-z)


def sigmoid(seen: Seen) -> Tensor:
    """-log sigmoid(z): DPO (arXiv 2305.18290, Eq. 7); with e > 0 conservative DPO (E. Mitchell, 2023)."""
    return smooth_logistic(seen.z, seen.smoothing)


def hinge(seen: Seen) -> Tensor:
    """max(0, 1 - z): SLiC as in RSO (arXiv 2309.06657)."""
    return torch.relu(1.0 - seen.z)


def ipo(seen: Seen) -> Tensor:
    """(c - r - 1 / (2 beta))^2: IPO (arXiv 2310.12036, Eq. 17), on log-probs a token unless told otherwise (the authors' own practice)."""
    return (seen.z / seen.beta - 1.0 / (2.0 * seen.beta)).square()


def robust(seen: Seen) -> Tensor:
    """[-(1 - e) log sigmoid(z) + e log sigmoid(-z)] / (1 - 2e): unbiased under flipped labels (arXiv 2403.00409, Eq. 12)."""
    e = seen.smoothing
    return (-(1.0 - e) * F.logsigmoid(seen.z) + e * F.logsigmoid(-seen.z)) / (1.0 - 2.0 * e)


def exo_pair(seen: Seen) -> Tensor:
    """KL(softmax(z, 0) || (1 - e, e)): EXO (arXiv 2402.00856, Eq. 16)."""
    right, wrong = F.logsigmoid(seen.z), F.logsigmoid(-seen.z)
    target = torch.tensor([1.0 - seen.smoothing, seen.smoothing], dtype=seen.z.dtype, device=seen.z.device).log()
    return right.exp() * (right - target[0]) + wrong.exp() * (wrong - target[1])


def nca_pair(seen: Seen) -> Tensor:
    """-log sigmoid(beta c) - [log sigmoid(-beta c) + log sigmoid(-beta r)] / 2: NCA (arXiv 2402.05369, Eq. 11 for two answers)."""
    chosen, rejected = seen.beta * seen.chosen_ratios, seen.beta * seen.rejected_ratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(seen: Seen) -> Tensor:
    """-log sigmoid(beta c - d) - log sigmoid(d - beta r): BCO (arXiv 2404.04656, Eq. 7).

    The shift d is the mean reward of the mini-batch, without gradient, where the paper takes a moving average over batches.
    """
    shift, _ = seen.others
    return -F.logsigmoid(seen.beta * seen.chosen_ratios - shift) - F.logsigmoid(shift - seen.beta * seen.rejected_ratios)


def bco_shift(seen: Seen) -> tuple[Tensor, Tensor]:
    """Mean reward over all answers of the mini-batch, for each of them."""
    mean = seen.beta * (seen.chosen_ratios.mean() + seen.rejected_ratios.mean()) / 2.0
    return mean.expand_as(seen.chosen_ratios), mean.expand_as(seen.rejected_ratios)


def sppo_hard(seen: Seen) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: SPPO (arXiv 2405.00675, Eq. 4.7) with the winner's probability taken as 1."""
    half = 0.5 / seen.beta
    return (seen.chosen_ratios - half).square() + (seen.rejected_ratios + half).square()


def aot(seen: Seen) -> Tensor:
    """Logistic loss of u_(k) - v_(k): AOT for pairs (arXiv 2406.05882, Eq. 4).

    u is the margin of log-probs chosen minus rejected under the policy, v that under the reference, each sorted over the whole
    mini-batch; u of a pair is compared with the v of the same rank.
    """
    partners, _ = seen.others
    return smooth_logistic(seen.beta * (seen.chosen_logps - seen.rejected_logps - partners), seen.smoothing)


def aot_partners(seen: Seen) -> tuple[Tensor, Tensor]:
    """For each pair the reference's margin of the rank that the policy's margin has."""
    margins = seen.chosen_logps - seen.rejected_logps
    reference = margins - (seen.chosen_ratios - seen.rejected_ratios)
    partners = _at_same_rank(margins, reference)
    return partners, partners


def aot_unpaired(seen: Seen) -> Tensor:
    """Logistic loss of c_(k) - r_(k), chosen and rejected answers sorted apart over the whole mini-batch: AOT (arXiv 2406.05882, Eq. 6).

    c and r of a rank may lie in different micro-batches. Each side therefore carries the term's gradient towards its own log-probs, with
    the other side's value given, and half of its value.
    """
    rejected_partners, chosen_partners = seen.others
    chosen = smooth_logistic(seen.beta * (seen.chosen_ratios - rejected_partners), seen.smoothing)
    rejected = smooth_logistic(seen.beta * (chosen_partners - seen.rejected_ratios), seen.smoothing)
    return chosen + rejected - 0.5 * (chosen + rejected).detach()


def aot_unpaired_partners(seen: Seen) -> tuple[Tensor, Tensor]:
    """For each answer the log-ratio of the other kind that has the same rank."""
    return _at_same_rank(seen.chosen_ratios, seen.rejected_ratios), _at_same_rank(seen.rejected_ratios, seen.chosen_ratios)


def apo_zero(seen: Seen) -> Tensor:
    """1 - sigmoid(beta c) + sigmoid(beta r): APO-zero (arXiv 2408.06266, Eq. 7), for chosen answers better than the model's own."""
    return torch.sigmoid(-seen.beta * seen.chosen_ratios) + torch.sigmoid(seen.beta * seen.rejected_ratios)


def apo_down(seen: Seen) -> Tensor:
    """sigmoid(beta c) + 1 - sigmoid(beta (c - r)): APO-down (arXiv 2408.06266, Eq. 8), for chosen answers worse than the model's own."""
    return torch.sigmoid(seen.beta * seen.chosen_ratios) + torch.sigmoid(seen.beta * (seen.rejected_ratios - seen.chosen_ratios))


def discopop(seen: Seen) -> Tensor:
    """(1 - m)(-log sigmoid(z)) + m exp(-z), m = sigmoid(z / 0.05): log-ratio modulated loss (arXiv 2406.08414, Eq. 5).

    m exp(-z) as one exponential: apart they are 0 and infinite where z is far below 0.
    """
    modulation = seen.z / DISCOPOP_TAU
    return -torch.sigmoid(-modulation) * F.logsigmoid(seen.z) + torch.exp(F.logsigmoid(modulation) - seen.z)


def simpo(seen: Seen) -> Tensor:
    """-log sigmoid(beta (log p_c / |c| - log p_r / |r|) - margin), no reference: SimPO (arXiv 2405.14734, Eq. 6)."""
    return smooth_logistic(seen.z, seen.smoothing)


def orpo(seen: Seen) -> Tensor:
    """NLL a token of the chosen answer - beta log sigmoid(log odds_c - log odds_r), no reference: ORPO (arXiv 2403.07691, Eq. 6 and 7)."""
    odds = _log_odds(seen.chosen_logps) - _log_odds(seen.rejected_logps)
    return seen.chosen_nll - seen.beta * F.logsigmoid(odds)


def kto_pair(seen: Seen) -> Tensor:
    """[1 - sigmoid(beta (c - k_r)) + 1 - sigmoid(beta (k_c - r))] / 2: KTO on pairs (arXiv 2402.01306, Eq. 7 and 8).

    k_c and k_r are the means of c and r over the mini-batch, at least 0 and without gradient: estimates of the policy's KL to the reference.
    """
    of_rejected, of_chosen = seen.others
    chosen = torch.sigmoid(seen.beta * (of_rejected - seen.chosen_ratios))
    rejected = torch.sigmoid(seen.beta * (seen.rejected_ratios - of_chosen))
    return 0.5 * (chosen + rejected)


def kto_kl(seen: Seen) -> tuple[Tensor, Tensor]:
    """For chosen answers the KL estimate from the rejected ones, and the other way round."""
    of_chosen, of_rejected = seen.chosen_ratios.mean().clamp(min=0.0), seen.rejected_ratios.mean().clamp(min=0.0)
    return of_rejected.expand_as(seen.chosen_ratios), of_chosen.expand_as(seen.rejected_ratios)


RULES: dict[str, Rule] = {
    "sigmoid": Rule(sigmoid, divergences=True, margins=True, smoothed=True),
    "sigmoid_norm": Rule(sigmoid, per_token=True, divergences=True, margins=True, smoothed=True),
    "hinge": Rule(hinge, divergences=True, margins=True),
    "ipo": Rule(ipo, per_token=True, divergences=True),
    "robust": Rule(robust, divergences=True, margins=True, smoothed=True),
    "exo_pair": Rule(exo_pair, divergences=True, smoothed=True),
    "nca_pair": Rule(nca_pair),
    "bco_pair": Rule(bco_pair, gather=bco_shift),
    "sppo_hard": Rule(sppo_hard),
    "aot": Rule(aot, smoothed=True, gather=aot_partners),
    "aot_unpaired": Rule(aot_unpaired, smoothed=True, gather=aot_unpaired_partners),
    "apo_zero": Rule(apo_zero),
    "apo_down": Rule(apo_down),
    "discopop": Rule(discopop, divergences=True),
    "simpo": Rule(simpo, reference=False, per_token=True, margins=True, smoothed=True),
    "orpo": Rule(orpo, reference=False, per_token=True),
    "kto_pair": Rule(kto_pair, gather=kto_kl),
}


def _at_same_rank(values_B: Tensor, others_B: Tensor) -> Tensor:
    """For each value the one of `others_B` that has the same rank."""
    out_B = torch.empty_like(others_B)
    out_B[values_B.argsort(stable=True)] = others_B.sort().values
    return out_B


def _log_odds(logp_B: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p < 0, exact for p near 0 and near 1."""
    logp_B = logp_B.clamp(max=-1e-6)
    near_one_B = torch.log(-torch.expm1(logp_B.clamp(min=-1.0)))
    near_zero_B = torch.log1p(-torch.exp(logp_B.clamp(max=-0.5)))
    return logp_B - torch.where(logp_B > -0.6931, near_one_B, near_zero_B)
