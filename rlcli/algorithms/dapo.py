"""The policy loss of DAPO (arXiv 2503.14476, Eq. 8): PPO's clipped ratio with a wider upper clip, summed over weighted tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlcli.algorithms.base import LossOutput, Tokens
from rlcli.algorithms.kl import k3
from rlcli.errors import UserError

Tensor = torch.Tensor

LOG_RATIO_CLAMP = 20.0  # nats; exp stays finite in float32, and clipping has long bound by then
MEANS = (
    "clip_low", "clip_high", "clip_dual", "kl", "ratio", "entropy", "gap", "gap_exp", "gap_kl", "correction", "correction_clipped",
)  # fmt: skip


@dataclass(frozen=True)
class DapoLoss:
    """The loss of one micro-batch; see `rlcli.algorithms.base.Loss`.

    Fields of the tokens, each [N]:
      advantage          of the token's sample
      weight             of the token in the mini-batch (`aggregate.token_weights`); 0: not trained on
      old_logprobs       under the weights that the ratio compares with; not read where `old_is_current`
      rollout_logprobs   under the rollout engine that sampled the token; needed for a correction, else only measured where given

    old_is_current: the weights have not changed since the rollout, so the ratio is 1 and only its gradient counts.
    correction: "token_clip" weights each token by min(old / rollout, correction_max) (truncated importance sampling);
      "token_mask" by old / rollout where that lies within [1 / correction_max, correction_max], else leaves the token out; "none".
      The weight carries no gradient and changes no denominator.
    entropy_coef > 0 adds a bonus with the policy term's own token weights.

    Entropy is reported whenever the engine gives it, with or without a bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_max: float = 2.0
    old_is_current: bool = False

    def __post_init__(self) -> None:
        if self.dual_clip and self.dual_clip <= 1.0:
            raise UserError(f"dapo.dual_clip={self.dual_clip}: the ceiling must be above 1, or 0 to switch it off")
        if self.correction not in ("none", "token_clip", "token_mask"):
            raise UserError(f"dapo.correction={self.correction}: one of none, token_clip, token_mask")

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0.0

    def __call__(self, tokens: Tokens) -> LossOutput:
        """Sum of weight x token loss over the trained tokens; a micro-batch without any gives 0 with a gradient of 0."""
        trained_N = tokens.fields["weight"] > 0
        pick = {name: values[trained_N] for name, values in tokens.fields.items()}
        new_M = tokens.logprobs_N[trained_N]
        entropy_M = None if tokens.entropy_N is None else tokens.entropy_N[trained_N]
        old_M = new_M.detach() if self.old_is_current else pick["old_logprobs"]

        ratio_M = (new_M - old_M).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        correction_M, clipped_M = self._correction(old_M, pick.get("rollout_logprobs"))
        policy_M, binds = self._surrogate(ratio_M, pick["advantage"])
        token_loss_M = policy_M * correction_M
        if self.entropy_coef:
            assert entropy_M is not None, "an entropy bonus needs the entropy"
            token_loss_M = token_loss_M - self.entropy_coef * entropy_M
        loss = (pick["weight"] * token_loss_M).sum()

        per_token = {**binds, "kl": k3(old_M, new_M), "ratio": ratio_M, "correction": correction_M, "correction_clipped": clipped_M}
        maxima = {"ratio_max": ratio_M}
        if entropy_M is not None:
            per_token["entropy"] = entropy_M
        if "rollout_logprobs" in pick:
            gap_M = old_M - pick["rollout_logprobs"]
            exp_M = gap_M.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
            per_token |= {"gap": gap_M.abs(), "gap_exp": exp_M, "gap_kl": k3(pick["rollout_logprobs"], old_M)}
            maxima["gap_max"] = gap_M.abs()
        sums = {name: values.detach().float().sum() for name, values in per_token.items()}
        sums |= {"loss": loss.detach(), "tokens": trained_N.sum().to(loss.dtype)}
        return LossOutput(loss, sums, {name: _largest(values) for name, values in maxima.items()})

    def _surrogate(self, ratio_M: Tensor, advantage_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and where each clip binds: only where the clipped branch is the one that counts."""
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_M = -torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)
        gain_M, harm_M = advantage_M > 0, advantage_M < 0
        binds = {"clip_high": gain_M & (ratio_M > 1.0 + self.clip_high), "clip_low": harm_M & (ratio_M < 1.0 - self.clip_low)}
        if self.dual_clip:  # arXiv 1912.09729, Eq. 5
            loss_M = torch.where(harm_M, torch.minimum(loss_M, -self.dual_clip * advantage_M), loss_M)
            binds["clip_dual"] = harm_M & (ratio_M > self.dual_clip)
        return loss_M, binds

    def _correction(self, old_M: Tensor, rollout_M: Tensor | None) -> tuple[Tensor, Tensor]:
        """The importance weight of trainer against rollout engine, and where its bound was hit."""
        if self.correction == "none":
            return torch.ones_like(old_M), torch.zeros_like(old_M)
        if rollout_M is None:
            raise KeyError(f"correction {self.correction} needs the field rollout_logprobs")
        weight_M = (old_M - rollout_M).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        beyond_M = weight_M > self.correction_max
        if self.correction == "token_clip":
            return weight_M.clamp(max=self.correction_max), beyond_M
        beyond_M |= weight_M < 1.0 / self.correction_max
        return torch.where(beyond_M, torch.zeros_like(weight_M), weight_M), beyond_M


def summarise(metrics: Mapping[str, float]) -> dict[str, float]:
    """Readable metrics from the sums over a mini-batch: means a trained token for all but loss, tokens and the maxima.

    Shares (clip_low, clip_high, clip_dual, correction_clipped) run from 0 to 1; log-prob gaps, entropy and KL are in nats.
    Without a trained token the means are left out.
    """
    tokens = metrics.get("tokens", 0.0)
    out = {}
    for name, value in metrics.items():
        if name not in MEANS:
            out[name] = float(value)
        elif tokens:
            out[name] = float(value) / tokens
    return out


def _largest(values_M: Tensor) -> Tensor:
    """The largest of values that are never negative; 0 where there are none."""
    values_M = values_M.detach()
    return values_M.max() if values_M.numel() else values_M.new_zeros(())
