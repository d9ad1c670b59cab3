"""What the model wrote, as rows of samples/train.jsonl and samples/eval.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlcli.types import Group, Sample, Verdict

Decode = Callable[[Sequence[int]], str]
KEPT = "\n\t"


def chosen(groups: Sequence[Group], limit: int) -> Iterator[tuple[Group, int]]:
    """Up to `limit` samples (-1: all) as (group, number): of each group first a right and a wrong one, so that few lines show both."""
    every = [(group, number) for group in groups for number in range(len(group.samples))]
    if limit < 0:
        yield from every
        return
    telling = []
    for group in groups:
        seen: set[bool] = set()
        for number, verdict in enumerate(group.verdicts):
            if verdict.correct not in seen:
                seen.add(verdict.correct)
                telling.append((group, number))
    yield from telling[:limit]


def rows(step: int, groups: Sequence[Group], limit: int, decode: Decode) -> list[dict[str, Any]]:
    """The JSON rows of the chosen samples of one step."""
    return [row(step, group, group.samples[number], group.verdicts[number], decode) for group, number in chosen(groups, limit)]


def row(step: int, group: Group, sample: Sample, verdict: Verdict, decode: Decode) -> dict[str, Any]:
    """One sample: texts, verdict, length and the mean log-prob of its tokens."""
    tokens = len(sample.token_ids)
    return {
        "step": step,
        "prompt_id": group.prompt.id,
        "prompt": decode([int(token) for token in group.prompt.token_ids]),
        "response": decode([int(token) for token in sample.token_ids]),
        "answer": group.prompt.answer,
        "extracted": verdict.answer,
        "correct": verdict.correct,
        "reason": verdict.reason,
        "score": verdict.score,
        "tokens": tokens,
        "finish": sample.finish_reason,
        "logprob": float(sample.logprobs.mean()) if tokens else 0.0,
        "policy_version": sample.policy_version,
        "group_correct": sum(other.correct for other in group.verdicts),
        "group_samples": len(group.samples),
    }


def fault_row(group: Group) -> dict[str, Any]:
    """Everything needed to look into a group that made a loss or gradient not finite."""
    return {
        "prompt_id": group.prompt.id,
        "prompt_token_ids": group.prompt.token_ids.tolist(),
        "answer": group.prompt.answer,
        "responses": [sample.token_ids.tolist() for sample in group.samples],
        "logprobs": [[float(value) for value in sample.logprobs] for sample in group.samples],
        "policy_versions": [sample.policy_version for sample in group.samples],
        "scores": [verdict.score for verdict in group.verdicts],
    }


def harmless(text: str) -> str:
    """The text with every control and format character but newline and tab spelt out."""
    return "".join(char if char.isprintable() or char in KEPT else f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}" for char in text)
