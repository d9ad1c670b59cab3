"""What is counted of all that was sampled."""

from __future__ import annotations

import numpy as np

from rlcli.trainers.rollouts import Tally
from rlcli.types import Group, Prompt, Sample, Verdict


def sample(tokens: int, finish_reason: str = "stop") -> Sample:
    return Sample(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), finish_reason, 0)


def test_every_reason_is_counted_and_lost_judgements_show() -> None:
    tally = Tally()
    verdicts = [Verdict(1.0, True, "5", "correct"), Verdict(-1.0, False, None, "timeout"), Verdict(-1.0, False, None, "crashed")]
    prompt = Prompt(0, np.zeros(1, np.int32), "5")
    tally.add(Group(prompt, [sample(2), sample(4, "length"), sample(3)], verdicts))
    tally.add(Group(prompt, [sample(3)], [Verdict(-1.0, False, None, "no_answer")]))
    assert tally.metrics() == {
        "sampled/samples": 4.0,
        "sampled/reward": -0.5,
        "sampled/accuracy": 0.25,
        "sampled/response_tokens": 3.0,
        "sampled/truncated": 0.25,
        "reward/correct": 1.0,
        "reward/wrong": 0.0,
        "reward/no_answer": 1.0,
        "reward/unparsed": 0.0,
        "reward/timeout": 1.0,
        "reward/crashed": 1.0,
    }
