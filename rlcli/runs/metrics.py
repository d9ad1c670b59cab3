"""Every metric of a run: its name as it stands in metrics.jsonl, and what it means. One table, read by the report and by `docs`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from rlcli.errors import UserError

MEANINGS: dict[str, str] = {
    # what was sampled in the step, before any filter: the honest measure of the policy
    "sampled/samples": "samples drawn",
    "sampled/reward": "mean score of all samples drawn, before shaping and filter",
    "sampled/accuracy": "share of all samples drawn that are right",
    "sampled/response_tokens": "mean length of all samples drawn, in tokens",
    "sampled/truncated": "share of all samples drawn that were cut at the limit",
    # what became of the groups
    "sampling/sampled": "groups that came back from generation",
    "sampling/carried_in": "groups kept from earlier steps",
    "sampling/trained": "groups trained on",
    "sampling/carried_out": "groups kept for later steps",
    "sampling/dropped_all_right": "groups dropped: every sample right",
    "sampling/dropped_all_wrong": "groups dropped: every sample wrong",
    "sampling/dropped_unjudged": "groups dropped: no sample could be judged",
    "sampling/dropped_incomplete": "groups dropped: samples missing or aborted",
    "sampling/dropped_stale": "groups dropped: waited longer than sampling.max_age",
    "sampling/waves": "waves of prompts",
    "sampling/acceptance": "share of newly sampled groups that were informative",
    "sampling/partial": "1 where the batch could not be filled",
    # what was trained on
    "batch/reward": "mean score of the samples trained on, before shaping",
    "batch/reward_shaped": "the same with the overlong penalty",
    "batch/accuracy": "share of the samples trained on that are right",
    "batch/response_tokens": "mean length of the samples trained on, in tokens",
    "batch/response_tokens_max": "longest of them",
    "batch/prompt_tokens": "mean length of the prompts trained on, in tokens",
    "batch/truncated": "share of the samples trained on that were cut at the limit",
    # the updates
    "update/loss": "loss of an update",
    "update/tokens": "response tokens in the loss",
    "update/entropy": "mean entropy of the policy a token, in nats",
    "update/clip_low": "share of tokens clipped from below (1 - clip_low)",
    "update/clip_high": "share of tokens clipped from above (1 + clip_high)",
    "update/clip_dual": "share of tokens held by the dual clip",
    "update/kl": "KL a token from what the policy is compared with (old policy, or reference) to the policy, in nats (k3)",
    "update/ratio": "mean importance ratio",
    "update/ratio_max": "largest importance ratio",
    "update/gap": "mean |log-prob difference| between trainer and rollout engine, in nats",
    "update/gap_max": "largest of them",
    "update/gap_exp": "mean ratio of trainer's to rollout engine's probabilities",
    "update/gap_kl": "KL a token between rollout engine and trainer, in nats (k3)",
    "update/correction": "mean importance correction between rollout engine and trainer",
    "update/correction_clipped": "share of tokens at the bound of the correction",
    "update/grad_norm": "norm of the whole gradient before clipping",
    "update/lr": "learning rate",
    "update/updates": "optimizer updates made",
    "update/empty": "updates left out because no token counted in the loss",
    "update/skipped": "updates left out because something was not finite",
    "update/skipped_in_all": "the same since the start of the run",
    "update/computed_tokens": "tokens computed forward and backward, prompts and answers",
    "update/micro_batches": "forward and backward passes over all devices",
    # pairs (DPO)
    "update/pairs": "pairs in the loss",
    "update/reward_chosen": "implicit reward of the chosen answers",
    "update/reward_rejected": "implicit reward of the rejected answers",
    "update/margin": "difference of the two",
    "update/accuracy": "share of pairs whose chosen answer has the higher implicit reward",
    "update/logp_chosen": "log-prob of the chosen answers, in nats",
    "update/logp_rejected": "log-prob of the rejected answers, in nats",
    "update/token_logp_chosen": "log-prob a token of the chosen answers, in nats",
    "update/token_logp_rejected": "log-prob a token of the rejected answers, in nats",
    "update/tokens_chosen": "mean length of the chosen answers, in tokens",
    "update/tokens_rejected": "mean length of the rejected answers, in tokens",
    "update/truncated_pairs": "share of the pairs that were cut to the length limits",
    "update/reference_gap": "mean |log-prob difference| between policy and given reference before the first update, in nats: rounding alone",
    # verdicts on all samples drawn, by how they came about
    "reward/correct": "samples whose answer is right",
    "reward/wrong": "samples whose answer is wrong",
    "reward/no_answer": "samples without an answer in the asked form",
    "reward/unparsed": "samples whose answer could not be read",
    "reward/timeout": "samples whose judgement took too long, scored as wrong",
    "reward/crashed": "samples whose judgement crashed, scored as wrong",
    # speed
    "rate/rollout_tokens_per_s": "response tokens sampled a second of rollout",
    "rate/update_tokens_per_s": "tokens computed forward and backward a second of update",
    "rate/trained_tokens_per_s": "response tokens trained on a second, end to end",
    "rate/samples_per_s": "samples trained on a second, end to end",
    "rate/pairs_per_s": "pairs trained on a second, end to end",
    "seconds/step": "seconds of the whole step",
    "seconds/rollout": "seconds of sampling and judging",
    "seconds/update": "seconds of log-probs, forward, backward and optimizer",
    "seconds/sync": "seconds of handing the weights to the rollout engines, probe included",
    "seconds/save": "seconds that training stood still for a checkpoint",
    "seconds/other": "seconds of everything else",
    "memory/all_gib": "memory of all processes of the run (PSS: shared pages counted once), in GiB",
    "sync/probe_gap": "mean |log-prob difference| of the probe after the weight sync, in nats",
    # held-out data
    "eval/accuracy": "share of samples on held-out prompts that are right (avg@k); of held-out pairs ranked rightly",
    "eval/reward": "mean score on held-out prompts",
    "eval/response_tokens": "mean length on held-out prompts, in tokens",
    "eval/truncated": "share of samples on held-out prompts that were cut at the limit",
    "eval/no_answer": "share of samples on held-out prompts without an answer in the asked form",
    "eval/unjudged": "share of samples on held-out prompts that the verifier timed out or crashed on",
    "eval/prompts": "held-out prompts",
    "eval/samples": "samples drawn for them",
    "eval/loss": "loss on held-out pairs",
    "eval/margin": "mean margin on held-out pairs",
}
FAMILIES = {
    "eval/avg@": "mean share of k samples that are right",
    "eval/pass@": "chance that at least one of k samples is right",
    "eval/maj@": "share of prompts whose most frequent answer is right",
    "seconds/": "seconds of this stage",
    "memory/": "memory, in GiB",
    "sampled/": "share or mean over all samples drawn",
    "reward/": "from the verifiers",
}


def meaning(name: str) -> str:
    """What a metric means; "" for one that this version does not know."""
    if name in MEANINGS:
        return MEANINGS[name]
    if name.startswith("eval/") and f"update/{name[5:]}" in MEANINGS:
        return f"on held-out data: {MEANINGS[f'update/{name[5:]}']}"
    return next((text for start, text in FAMILIES.items() if name.startswith(start)), "")


def check_metric(setting: str, name: str) -> None:
    """Raise UserError where `setting` names a metric that no run has."""
    if not meaning(name):
        near = difflib.get_close_matches(name, [*MEANINGS, *(f"eval/{known[7:]}" for known in MEANINGS if known.startswith("update/"))], 1)
        raise UserError(f"{setting}: there is no metric {name}{f', did you mean {near[0]}?' if near else ''} (a run's report lists them)")


def stages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by stage; what no stage claims is "other". They add up to seconds/step."""
    parts = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/") and name != "seconds/step"}
    rest = metrics.get("seconds/step", 0.0) - sum(parts.values())
    return {**parts, "other": rest} if rest > 1e-6 else parts
