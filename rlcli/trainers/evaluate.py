"""Measuring a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.algorithms import evaluation
from rlcli.config.schema import EvalConfig, RolloutConfig
from rlcli.engines.base import Sampling
from rlcli.trainers.rollouts import Judge
from rlcli.types import Group, Prompt


def evaluate(
    judge: Judge, prompts: Sequence[Prompt], config: EvalConfig, rollout: RolloutConfig, seed: int | None
) -> tuple[dict[str, float], list[Group]]:
    """avg@k, pass@k, maj@k, lengths and shares (see `algorithms.evaluation`), and the judged groups in the prompts' order.

    Greedy where the temperature is 0: then one sample a prompt says everything.
    """
    chosen = prompts[: config.max_prompts] if config.max_prompts else prompts
    sampling = Sampling(
        samples=config.samples_per_prompt if config.temperature > 0 else 1,
        max_tokens=rollout.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        stop=tuple(rollout.stop),
        seed=seed,
    )
    judged = dict(judge.groups(chosen, sampling, counted=False))
    judge.read_tally()  # held-out samples are no part of a step's own numbers
    groups = [judged[place] for place in sorted(judged)]
    return evaluation.evaluate(groups), groups
