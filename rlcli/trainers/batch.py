"""From judged groups to what the training engine trains on: rewards, advantages, and each token's weight in the mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlcli.algorithms.advantage import advantages
from rlcli.algorithms.aggregate import token_weights
from rlcli.config.schema import DapoRecipe, RewardConfig, RolloutConfig
from rlcli.rewards.shaping import overlong_penalty
from rlcli.types import FloatArray, Group, TrainRow


def shaped_rewards(group: Group, reward: RewardConfig, rollout: RolloutConfig) -> list[float]:
    """Score and overlong penalty (DAPO Eq. 13) of each sample. The filter has looked at the raw outcome before."""
    return [
        verdict.score
        + reward.overlong_penalty * overlong_penalty(len(sample.token_ids), rollout.max_response_tokens, reward.overlong_buffer_tokens)
        for sample, verdict in zip(group.samples, group.verdicts, strict=True)
    ]


def trainable_lengths(group: Group, config: DapoRecipe) -> list[int]:
    """Tokens of each sample that count in the loss: none of a truncated one where those are masked, none of an aborted one."""
    masked = config.dapo.mask_truncated
    return [0 if (masked and sample.truncated) or sample.finish_reason == "abort" else len(sample.token_ids) for sample in group.samples]


def mini_batches(groups: Sequence[Group], config: DapoRecipe) -> Iterator[Sequence[Group]]:
    """The groups of each optimizer update of one epoch, in order; the last one of a partial batch may be smaller."""
    size = config.train.mini_batch_prompts or config.train.batch_prompts
    for start in range(0, len(groups), size):
        yield groups[start : start + size]


def updates_per_step(config: DapoRecipe) -> int:
    size = config.train.mini_batch_prompts or config.train.batch_prompts
    return config.dapo.epochs * (config.train.batch_prompts // size)


def _spread(values: Sequence[float], group: Group) -> list[FloatArray]:
    """One value a sample, repeated for each of its tokens."""
    return [np.full(len(sample.token_ids), value, np.float32) for value, sample in zip(values, group.samples, strict=True)]


@np.errstate(over="ignore", invalid="ignore")  # rewards beyond all bounds give a loss that is not finite, which is said there
def training_rows(groups: Sequence[Group], config: DapoRecipe, old_logprobs: Sequence[list[FloatArray]] | None) -> list[TrainRow]:
    """One row a group, with the fields that `DapoLoss` reads.

    The weights make the loss a sum over the whole mini-batch: `groups` must be exactly one optimizer update.

    old_logprobs: for each group, its samples' log-probs that the ratio is taken against; none: the current ones.
    """
    lengths = [trainable_lengths(group, config) for group in groups]
    weights = token_weights(config.dapo.aggregate, lengths, config.rollout.max_response_tokens)
    rows = []
    for number, group in enumerate(groups):
        rewards = shaped_rewards(group, config.reward, config.rollout)
        advantage_G = advantages(rewards, config.dapo.advantage, config.dapo.std_floor)
        fields = {
            "advantage": _spread([float(value) for value in advantage_G], group),
            "weight": _spread(weights[number], group),
            "rollout_logprobs": [sample.logprobs for sample in group.samples],
        }
        if old_logprobs is not None:
            fields["old_logprobs"] = old_logprobs[number]
        rows.append(TrainRow(group.prompt.token_ids, [sample.token_ids for sample in group.samples], fields))
    return rows


def plain_rows(groups: Sequence[Group]) -> list[TrainRow]:
    """Rows without fields, to ask for log-probs."""
    return [TrainRow(group.prompt.token_ids, [sample.token_ids for sample in group.samples]) for group in groups]


@np.errstate(over="ignore", invalid="ignore")
def group_metrics(groups: Sequence[Group], config: DapoRecipe) -> dict[str, float]:
    """Means over the samples that are trained on: raw reward, shaped reward, accuracy, lengths in tokens, share truncated."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    lengths = np.array([len(sample.token_ids) for sample in samples])
    shaped = [value for group in groups for value in shaped_rewards(group, config.reward, config.rollout)]
    return {
        "batch/reward": float(np.mean([verdict.score for verdict in verdicts])),
        "batch/reward_shaped": float(np.mean(shaped)),
        "batch/accuracy": float(np.mean([verdict.correct for verdict in verdicts])),
        "batch/response_tokens": float(lengths.mean()),
        "batch/response_tokens_max": float(lengths.max()),
        "batch/prompt_tokens": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        "batch/truncated": float(np.mean([sample.truncated for sample in samples])),
    }
