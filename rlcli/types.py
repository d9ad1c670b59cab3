"""What travels between the parts of msrl. Dimension suffixes: T response tokens, P prompt tokens, G samples of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class Prompt:
    """One prompt of a prepared data set, rendered and tokenised once."""

    id: int  # row number in the prepared data set
    token_ids: Int32Array  # [P]
    answer: str  # what the verifiers compare with; "" where a row has none
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Sample:
    """One response as the rollout engine sampled it; these very ids are trained on."""

    token_ids: Int32Array  # [T], the end token included where the model produced it
    logprobs: FloatArray  # [T], natural log-probabilities under the distribution sampled from
    finish_reason: str  # "stop", "length" (truncated) or "abort"
    policy_version: int  # version of the weights that sampled it

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class Verdict:
    """A verifier's judgement of one response."""

    score: float  # the reward before shaping
    correct: bool
    answer: str | None  # what was extracted from the response
    reason: str  # correct, wrong, no_answer, unparsed, timeout or crashed


@dataclass(slots=True)
class Group:
    """One prompt, its G samples and their verdicts (empty until judged)."""

    prompt: Prompt
    samples: list[Sample]
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def policy_version(self) -> int:
        """The oldest weights that any sample of the group came from."""
        return min(sample.policy_version for sample in self.samples)


@dataclass(slots=True)
class TrainRow:
    """One prompt and the responses trained on under it.

    Packing may part a row between responses where it does not fit in one micro-batch, but never if `splittable` is
    false, as for a DPO pair, whose loss needs both of its log-probs.
    `fields` holds, by name, one array [T_i] for each response (advantage, weight, old_logprobs, ...), aligned with its tokens.
    """

    prompt: Int32Array  # [P]
    responses: list[Int32Array]  # each [T_i]
    fields: dict[str, list[FloatArray]] = field(default_factory=dict)
    splittable: bool = True

    def tokens(self, shared: bool) -> int:
        """Tokens that a forward pass computes for this row, with the prompt shared or repeated for each response."""
        responses = sum(len(response) for response in self.responses)
        return responses + len(self.prompt) * (1 if shared else len(self.responses))
