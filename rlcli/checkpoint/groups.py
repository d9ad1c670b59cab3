"""Groups and prompts as plain arrays and JSON, exactly: what a checkpoint keeps of work under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcli.types import Group, Prompt, Sample, Verdict

Arrays = dict[str, npt.NDArray[Any]]


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], Arrays]:
    """(JSON-able records, arrays): prompt tokens, response tokens and log-probs, each laid end to end."""
    records, prompts = pack_prompts([group.prompt for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    for record, group in zip(records, groups, strict=True):
        record["samples"] = [[len(s.token_ids), s.finish_reason, s.policy_version] for s in group.samples]
        record["verdicts"] = [[v.score, v.correct, v.answer, v.reason] for v in group.verdicts]
    arrays = {
        "prompt_ids": prompts["prompt_ids"],
        "response_ids": _join([sample.token_ids for sample in samples], np.int32),
        "logprobs": _join([sample.logprobs for sample in samples], np.float32),
    }
    return records, arrays


def unpack_groups(records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Group]:
    """The groups that `pack_groups` was given, bit for bit."""
    groups, at = [], 0
    for record, prompt in zip(records, unpack_prompts(records, arrays), strict=True):
        samples = []
        for length, finish_reason, version in record["samples"]:
            part = slice(at, at + length)
            samples.append(Sample(arrays["response_ids"][part].copy(), arrays["logprobs"][part].copy(), finish_reason, version))
            at += length
        groups.append(Group(prompt, samples, [Verdict(*verdict) for verdict in record["verdicts"]]))
    return groups


def pack_prompts(prompts: Sequence[Prompt]) -> tuple[list[dict[str, Any]], Arrays]:
    """(JSON-able records, arrays) of prompts; what a prompt carries in `extra` must be JSON-able."""
    records = [{"id": p.id, "tokens": len(p.token_ids), "answer": p.answer, "extra": p.extra} for p in prompts]
    return records, {"prompt_ids": _join([p.token_ids for p in prompts], np.int32)}


def unpack_prompts(records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Prompt]:
    """The prompts that `pack_prompts` was given."""
    prompts, at = [], 0
    for record in records:
        ids = arrays["prompt_ids"][at : at + record["tokens"]].copy()
        prompts.append(Prompt(record["id"], ids, record["answer"], record["extra"]))
        at += record["tokens"]
    return prompts


def _join(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
