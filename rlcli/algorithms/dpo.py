"""Direct preference optimisation as one loss object: any of the losses in `preference.RULES`, alone or summed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlcli.algorithms.base import LossOutput, Tokens
from rlcli.algorithms.kl import k3
from rlcli.algorithms.pairs import DIVERGENCES, Answers, answers_of, divergence_scores, tokens_of
from rlcli.algorithms.preference import RULES, Seen
from rlcli.errors import UserError
from rlcli.types import FloatArray, TrainRow

Tensor = torch.Tensor
PER_TOKEN = ("kl", "entropy", "reference_gap")


@dataclass(frozen=True)
class DpoLoss:
    """The loss of one micro-batch of rows [prompt, chosen, rejected]; see `rlcli.algorithms.base.Loss`. Settings: `DpoLossConfig`.

    Fields of the tokens, each [N]: `ref_logprobs` under the reference (not for simpo and orpo alone) and `mask` (0: not covered by
    the loss; absent: all are). `pairs` counts those of the whole mini-batch, over all devices: each pair weighs 1 / pairs.

    Losses that depend on the mini-batch as a whole (`needs_gather`: aot, aot_unpaired, bco_pair, kto_pair) need one pass without gradient first:
    `gathered` takes the log-probs of all its rows and gives rows that carry what each pair must know of the others.

    reference_is_current: the policy still is the reference, so all log-ratios are 0 and only their gradients count. Given log-probs of
    the reference, which other packings may have rounded otherwise, are then only measured against the policy's (`reference_gap`).
    """

    losses: tuple[str, ...] = ("sigmoid",)
    weights: tuple[float, ...] = (1.0,)
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_coef: float = 0.0
    margin: float = 0.0
    length_normalise: bool | None = None
    ld_alpha: float = 1.0
    divergence: str = "reverse_kl"
    alpha: float = 0.5
    pairs: int = 1
    reference_is_current: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return any(RULES[name].reference for name in self.losses)

    @property
    def needs_gather(self) -> bool:
        return any(RULES[name].gather for name in self.losses)

    def __call__(self, tokens: Tokens) -> LossOutput:
        """Sum over the micro-batch's pairs of the weighted losses and the SFT term, divided by `pairs`."""
        if self.needs_reference and "ref_logprobs" not in tokens.fields:
            raise KeyError(f"the losses {', '.join(self.losses)} need the field ref_logprobs")
        given, tokens = tokens, self._compared(tokens)
        chosen, rejected = answers_of(tokens, self.ld_alpha)
        loss_B = self.sft_coef * _nll(chosen) if self.sft_coef else torch.zeros_like(chosen.logps)
        for name, weight in zip(self.losses, self.weights, strict=True):
            seen = self._seen(name, chosen, rejected)
            if RULES[name].gather:
                first_S = torch.searchsorted(tokens.sample_N, torch.arange(len(tokens.row_S), device=tokens.sample_N.device))
                values_S = tokens.fields[_field(name)][first_S]
                seen = replace(seen, batch=(values_S[0::2], values_S[1::2]))
            loss_B = loss_B + weight * RULES[name].function(seen)
        loss = loss_B.sum() / self.pairs
        with torch.no_grad():
            sums = {"loss": loss.detach(), **self._measures(tokens, chosen, rejected)}
            if tokens is not given:
                sums["reference_gap"] = (given.logprobs_N - given.fields["ref_logprobs"])[_covered(given)].abs().sum()
        return LossOutput(loss, sums)

    def gathered(self, rows: Sequence[TrainRow], logprobs: Sequence[Sequence[FloatArray]]) -> list[TrainRow]:
        """All rows of a mini-batch, each with what its pair must know of the others, from the policy's log-probs as they are now."""
        with torch.no_grad():
            chosen, rejected = answers_of(self._compared(tokens_of(rows, logprobs)), self.ld_alpha)
            found = {_field(name): gather(self._seen(name, chosen, rejected)) for name in self.losses if (gather := RULES[name].gather)}
        out = []
        for index, row in enumerate(rows):
            new = {
                name: [np.full(len(response), side[index].item(), np.float32) for response, side in zip(row.responses, sides, strict=True)]
                for name, sides in found.items()
            }
            out.append(TrainRow(row.prompt, row.responses, {**row.fields, **new}))
        return out

    def measure(self, rows: Sequence[TrainRow], logprobs: Sequence[Sequence[FloatArray]]) -> dict[str, float]:
        """Loss and metrics of whole rows without an update, from log-probs that the training engine gave: for held-out pairs."""
        rows = self.gathered(rows, logprobs) if self.needs_gather else rows
        out = replace(self, pairs=len(rows))(tokens_of(rows, logprobs))
        return summarise({name: value.item() for name, value in out.sums.items()})

    def _compared(self, tokens: Tokens) -> Tokens:
        """The tokens with the reference that log-ratios are taken to."""
        if not (self.reference_is_current and "ref_logprobs" in tokens.fields):
            return tokens
        return replace(tokens, fields={**tokens.fields, "ref_logprobs": tokens.logprobs_N.detach()})

    def _seen(self, name: str, chosen: Answers, rejected: Answers) -> Seen:
        """The pairs as the loss `name` looks at them: summed or a token, with or without reference, through the divergence."""
        rule = RULES[name]
        per_token = rule.per_token if self.length_normalise is None else self.length_normalise
        norm_c, norm_r = (_length(side) if per_token else torch.ones_like(side.lengths) for side in (chosen, rejected))
        ratio_c, ratio_r = (chosen.ratios, rejected.ratios) if rule.reference else (chosen.logps, rejected.logps)
        divergence = self.divergence if rule.reference else "reverse_kl"
        score_c, score_r = (divergence_scores(ratios, divergence, self.alpha) for ratios in (ratio_c, ratio_r))
        return Seen(
            z=self.beta * (score_c / norm_c - score_r / norm_r) - self.margin,
            chosen_ratios=ratio_c / norm_c,
            rejected_ratios=ratio_r / norm_r,
            chosen_logps=chosen.logps / norm_c,
            rejected_logps=rejected.logps / norm_r,
            chosen_nll=_nll(chosen),
            beta=self.beta,
            smoothing=self.label_smoothing,
        )

    def _measures(self, tokens: Tokens, chosen: Answers, rejected: Answers) -> dict[str, Tensor]:
        """Sums over pairs and over tokens, which `summarise` divides."""
        sides = [self.beta * (side.ratios if self.needs_reference else side.logps / _length(side)) for side in (chosen, rejected)]
        margin_B = sides[0] - sides[1]
        per_pair = {
            "reward_chosen": sides[0],
            "reward_rejected": sides[1],
            "margin": margin_B,
            "accuracy": (margin_B > 0).float() + 0.5 * (margin_B == 0).float(),
            "logp_chosen": chosen.plain_logps,
            "logp_rejected": rejected.plain_logps,
            "token_logp_chosen": chosen.plain_logps / _length(chosen),
            "token_logp_rejected": rejected.plain_logps / _length(rejected),
            "tokens_chosen": chosen.lengths,
            "tokens_rejected": rejected.lengths,
        }
        sums = {name: values.sum() for name, values in per_pair.items()}
        sums["pairs"] = torch.full_like(sums["margin"], len(margin_B))
        covered_N = _covered(tokens)
        if "ref_logprobs" in tokens.fields:
            sums["kl"] = k3(tokens.logprobs_N, tokens.fields["ref_logprobs"])[covered_N].sum()
        if tokens.entropy_N is not None:
            sums["entropy"] = tokens.entropy_N[covered_N].sum()
        return sums


def summarise(metrics: Mapping[str, float]) -> dict[str, float]:
    """Readable metrics from the sums over a mini-batch.

    loss as it is; kl (k3, which is the KL to the reference only in so far as the answers are typical of the policy), entropy and
    reference_gap a token, in nats; pairs as counted; everything else a mean over pairs. reward = beta x log-ratio to the reference (without one: x log-prob a token);
    accuracy: share of pairs with reward_chosen > reward_rejected, equal ones counted as half.
    """
    pairs, tokens = metrics.get("pairs", 0.0), metrics.get("tokens_chosen", 0.0) + metrics.get("tokens_rejected", 0.0)
    out = {}
    for name, value in metrics.items():
        if name in ("loss", "pairs") or name.endswith("_max"):
            out[name] = float(value)
        elif pairs and tokens:
            out[name] = float(value) / (tokens if name in PER_TOKEN else pairs)
    return out


def _check(loss: DpoLoss) -> None:
    """Settings that cannot work together, each with its line."""
    unknown = [name for name in loss.losses if name not in RULES]
    if unknown or not loss.losses:
        raise UserError(f"dpo.losses: {', '.join(unknown) or 'none given'}; known are {', '.join(RULES)}")
    if len(loss.weights) != len(loss.losses):
        raise UserError(f"dpo.weights has {len(loss.weights)} numbers for {len(loss.losses)} losses; give one for each of {', '.join(loss.losses)}")
    if len(set(loss.losses)) < len(loss.losses):
        raise UserError(f"dpo.losses names a loss twice: {', '.join(loss.losses)}; give it once, with a larger one of dpo.weights")
    if not all(0 <= weight < math.inf for weight in loss.weights) or (not any(loss.weights) and not loss.sft_coef):
        raise UserError(f"dpo.weights={list(loss.weights)}: needs numbers of at least 0, one of them above 0")
    if not 0 < loss.beta < math.inf:
        raise UserError(f"dpo.beta={loss.beta}: must be a number above 0")
    if loss.divergence not in DIVERGENCES:
        raise UserError(f"dpo.divergence={loss.divergence}: one of {', '.join(DIVERGENCES)}")
    if not 0 <= loss.label_smoothing <= 0.5 or ("robust" in loss.losses and loss.label_smoothing == 0.5):
        raise UserError(f"dpo.label_smoothing={loss.label_smoothing}: from 0 to 0.5, and below 0.5 for robust, which divides by 1 - 2 x it")
    if "exo_pair" in loss.losses and loss.label_smoothing == 0:
        raise UserError("dpo.losses has exo_pair, which needs dpo.label_smoothing above 0 (0.001 is usual): it divides by it")
    _refuse(loss, loss.label_smoothing > 0, "smoothed", f"dpo.label_smoothing={loss.label_smoothing}")
    _refuse(loss, loss.margin != 0, "margins", f"dpo.margin={loss.margin}")
    _refuse(loss, loss.divergence != "reverse_kl", "divergences", f"dpo.divergence={loss.divergence}")


def _refuse(loss: DpoLoss, asked: bool, trait: str, setting: str) -> None:
    """A setting that some loss of the list would silently ignore is an error."""
    deaf = [name for name in loss.losses if not getattr(RULES[name], trait)] if asked else []
    if deaf:
        able = [name for name, rule in RULES.items() if getattr(rule, trait)]
        raise UserError(f"{setting} has no meaning for dpo.losses {', '.join(deaf)}; it applies to {', '.join(able)}")


def _covered(tokens: Tokens) -> Tensor:
    """Which tokens the loss covers, [N] bool."""
    return tokens.fields["mask"] > 0 if "mask" in tokens.fields else torch.ones_like(tokens.logprobs_N, dtype=torch.bool)


def _length(side: Answers) -> Tensor:
    return side.lengths.clamp(min=1.0)


def _nll(side: Answers) -> Tensor:
    return -side.plain_logps / _length(side)


def _field(name: str) -> str:
    return f"{name}_batch"
