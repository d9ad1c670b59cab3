"""Sampling and judging at once: while the engine still decodes, finished groups are already with the verifiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlcli.engines.base import Request, RolloutEngine, Sampling
from rlcli.rewards.pool import Item, RewardPool
from rlcli.rewards.verdicts import count_reasons
from rlcli.types import Group, Prompt, Sample, Verdict

POLL_S = 0.5


@dataclass(slots=True)
class Tally:
    """All that was sampled since the last reading, whatever became of it."""

    samples: int = 0
    response_tokens: int = 0
    correct: int = 0
    truncated: int = 0
    score: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, group: Group) -> None:
        self.samples += len(group.samples)
        self.response_tokens += sum(len(sample.token_ids) for sample in group.samples)
        self.truncated += sum(sample.truncated for sample in group.samples)
        self.correct += sum(verdict.correct for verdict in group.verdicts)
        self.score += sum(verdict.score for verdict in group.verdicts)
        self.verdicts += group.verdicts

    def metrics(self) -> dict[str, float]:
        """Means over every sample drawn, before any filter: the honest measure of the policy."""
        if not self.samples:
            return {"sampled/samples": 0.0}
        return {
            "sampled/samples": float(self.samples),
            "sampled/reward": self.score / self.samples,
            "sampled/accuracy": self.correct / self.samples,
            "sampled/response_tokens": self.response_tokens / self.samples,
            "sampled/truncated": self.truncated / self.samples,
            **{f"reward/{reason}": float(count) for reason, count in count_reasons(self.verdicts).items()},
        }


class Judge:
    """Turns prompts into judged groups, with one rollout engine, one reward pool and the model's tokenizer."""

    def __init__(self, rollout: RolloutEngine, rewards: RewardPool, decode: Callable[[Sequence[int]], str]) -> None:
        self.rollout, self.rewards, self.decode = rollout, rewards, decode
        self.tally = Tally()
        self.drawn = 0  # prompts sampled in this run: numbers every request, so that no seed is ever used twice

    def groups(
        self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool] | None = None, counted: bool = True
    ) -> Iterator[tuple[int, Group]]:
        """Yield (place in `prompts`, group) as soon as each group is judged.

        Where `stop()` becomes true, what is unfinished is aborted and left out. Not `counted`: the requests are numbered from 0, so that
        an evaluation has the same seeds whenever it is made, and leaves no trace in the run.
        """
        first = self.drawn if counted else 0
        self.drawn += len(prompts) if counted else 0
        waiting: dict[int, Group] = {}
        requests = [Request(first + place, prompt.token_ids) for place, prompt in enumerate(prompts)]
        for key, samples in self.rollout.generate(requests, sampling, stop):
            waiting[key] = Group(prompts[key - first], samples)
            self.rewards.submit(key, self.items(waiting[key].prompt, samples))
            yield from self._judged(waiting, first, timeout=0.0)
        while waiting:
            yield from self._judged(waiting, first, timeout=POLL_S)

    def items(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Item]:
        return [Item(self.decode(sample.token_ids.tolist()), prompt.answer, prompt.extra) for sample in samples]

    def read_tally(self) -> dict[str, float]:
        """Metrics of everything sampled since the last reading."""
        tally, self.tally = self.tally, Tally()
        return tally.metrics()

    def _judged(self, waiting: dict[int, Group], first: int, timeout: float) -> Iterator[tuple[int, Group]]:
        for key, verdicts in self.rewards.poll(timeout):
            group = waiting.pop(int(str(key)), None)
            if group is not None:  # else: of a wave that was given up
                judged = replace(group, verdicts=list(verdicts))
                self.tally.add(judged)
                yield int(str(key)) - first, judged
