"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): sample prompts until a batch of informative groups is full.

A group is informative when some of its samples are right and some wrong. That is judged on `Verdict.correct`, never on a shaped reward:
with a length penalty in it, groups that are all wrong have a spread too, and a run that trains on them collapses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcli.checkpoint.groups import Arrays, pack_groups, pack_prompts, unpack_groups, unpack_prompts
from rlcli.config.schema import SamplingConfig
from rlcli.errors import StoppedEarly, UserError
from rlcli.types import Group, Prompt

Take = Callable[[int], list[Prompt]]
Generate = Callable[[list[Prompt]], Iterator[tuple[int, Group]]]

NO_VERDICT = ("timeout", "crashed")
HALF_LIFE_BATCHES = 2.0  # the acceptance estimate forgets half of its past in so many batches of prompts
MOST_BATCHES_A_WAVE = 4  # a wave is never larger than so many batches of prompts, however low the acceptance


@dataclass
class Counts:
    """What became of a step's groups. sampled + carried_in = trained + carried_out + all that were dropped, at the end of every step."""

    sampled: int = 0  # groups that came back from generation
    carried_in: int = 0  # surplus of earlier steps, before this one began
    trained: int = 0
    carried_out: int = 0  # surplus that waits for later steps
    dropped_all_right: int = 0
    dropped_all_wrong: int = 0
    dropped_unjudged: int = 0  # verifiers timed out or crashed on every sample
    dropped_incomplete: int = 0  # samples aborted or missing
    dropped_stale: int = 0  # surplus that waited longer than `sampling.max_age`
    waves: int = 0


@dataclass
class Collected:
    """The groups of one step: exactly `batch_prompts` of them, unless `partial`."""

    groups: list[Group]
    counts: Counts
    acceptance: float  # share of this step's newly sampled groups that were informative; nan where none was sampled
    oldest_version: int  # of the weights that sampled any of the groups
    partial: bool = False
    exhausted: bool = False  # the data ended; only where the cursor has an end


@dataclass(slots=True)
class _Waiting:
    """An informative group and the step it was sampled in."""

    group: Group
    step: int


def outcome(group: Group, samples_per_prompt: int) -> str:
    """What the filter says of a judged group: kept, all_right, all_wrong, unjudged or incomplete.

    Samples on which the verifier timed out or crashed have no part in it: their outcome is not known, and a group must not become
    informative by a fault of the verifier.
    """
    if len(group.samples) < samples_per_prompt or any(sample.finish_reason == "abort" for sample in group.samples):
        return "incomplete"
    right = [verdict.correct for verdict in group.verdicts if verdict.reason not in NO_VERDICT]
    if not right:
        return "unjudged"
    if all(right):
        return "all_right"
    return "kept" if any(right) else "all_wrong"


@dataclass
class Sampler:
    """Collects the groups of each step and carries surplus ones over to the next.

    take(k) hands out the next k prompts; fewer, or none, only where the data has an end.
    generate(prompts) yields (index into prompts, judged group), in any order; it may leave prompts out: they count as outstanding.
    log(text) gets one line whenever a step ends other than full.

    A wave is always waited for to its end, and its groups are used in the order of their prompts. Taking those that finish first would
    prefer short answers, and would let timing change the result.

    When anything is raised while a step is collected, the groups accepted so far and the prompts without an answer stay here:
    `collect` for the same step goes on from them, and `state` saves them.
    """

    config: SamplingConfig
    batch_prompts: int
    samples_per_prompt: int
    take: Take
    generate: Generate
    log: Callable[[str], None] = lambda text: None
    _carried: list[_Waiting] = field(default_factory=list)  # oldest first
    _outstanding: list[Prompt] = field(default_factory=list)  # taken, not answered
    _unfinished: Counts | None = None  # of a step that was broken off
    _accepted: float = 0.0  # decaying numbers of groups accepted and judged
    _judged: float = 0.0

    def __post_init__(self) -> None:
        if self.config.enabled and self.samples_per_prompt < 2:
            raise UserError(
                "sampling.enabled=true with rollout.samples_per_prompt=1: one sample is always all right or all wrong, so every group would "
                "be dropped; ask for 2 or more samples, or set sampling.enabled=false"
            )

    def collect(self, step: int, policy_version: int) -> Collected:
        """The groups of `step`, from weights `policy_version`. Raises StoppedEarly at `max_batches` waves under `on_exhausted: stop`."""
        counts = self._unfinished or Counts(carried_in=len(self._carried))
        self._unfinished = counts
        self._drop_stale(step, counts)
        fresh_before, kept_before = counts.sampled, self._kept(counts)
        exhausted, waves = False, 0
        while len(self._carried) < self.batch_prompts and waves < self.config.max_batches:
            prompts = self._next_prompts(self._wave_size(self.batch_prompts - len(self._carried)))
            if not prompts:
                exhausted = True
                break
            waves += 1
            counts.waves += 1
            self._run_wave(prompts, step, counts)
        partial = len(self._carried) < self.batch_prompts
        if partial:
            self._give_up(step, waves, exhausted)
        fresh = counts.sampled - fresh_before
        acceptance = (self._kept(counts) - kept_before) / fresh if fresh else math.nan
        return self._close(step, policy_version, counts, acceptance, partial, exhausted)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Everything the next step depends on: JSON-able values, and arrays by name."""
        carried, arrays = pack_groups([waiting.group for waiting in self._carried])
        outstanding, prompt_arrays = pack_prompts(self._outstanding)
        values = {
            "carried": carried,
            "steps": [waiting.step for waiting in self._carried],
            "outstanding": outstanding,
            "unfinished": asdict(self._unfinished) if self._unfinished else None,
            "accepted": self._accepted,
            "judged": self._judged,
        }
        return values, arrays | {"outstanding_ids": prompt_arrays["prompt_ids"]}

    def restore(self, values: dict[str, Any], arrays: Arrays) -> None:
        """Take over what `state` gave: from here on this sampler does what that one would have done."""
        groups = unpack_groups(values["carried"], arrays)
        self._carried = [_Waiting(group, step) for group, step in zip(groups, values["steps"], strict=True)]
        self._outstanding = unpack_prompts(values["outstanding"], {"prompt_ids": arrays["outstanding_ids"]})
        self._unfinished = Counts(**values["unfinished"]) if values["unfinished"] else None
        self._accepted, self._judged = values["accepted"], values["judged"]

    @property
    def unfinished(self) -> bool:
        """Whether a step was broken off, so that there is more to save than at its start."""
        return self._unfinished is not None

    @property
    def acceptance(self) -> float:
        """The running estimate of the share of prompts that give an informative group; starts at 1."""
        return (self._accepted + 1.0) / (self._judged + 1.0)

    def _wave_size(self, need: int) -> int:
        """Prompts to sample so that `need` groups may be expected to pass."""
        if not self.config.enabled:
            return need
        asked = math.ceil(need / self.acceptance * self.config.oversample)
        return min(asked, MOST_BATCHES_A_WAVE * self.batch_prompts)

    def _next_prompts(self, size: int) -> list[Prompt]:
        """The next prompts; those that were taken before and never answered come first."""
        again = self._outstanding[:size]
        new = self.take(size - len(again)) if len(again) < size else []
        self._outstanding = self._outstanding[size:]
        return again + new

    def _run_wave(self, prompts: list[Prompt], step: int, counts: Counts) -> None:
        """Generate for all prompts; put away the informative groups, in the prompts' order, also when it is broken off."""
        waiting = dict(enumerate(prompts))
        accepted: dict[int, Group] = {}
        try:
            for index, group in self.generate(prompts):
                del waiting[index]
                counts.sampled += 1
                verdict = outcome(group, self.samples_per_prompt)
                if verdict == "kept" or (not self.config.enabled and verdict in ("all_right", "all_wrong")):
                    accepted[index] = group
                else:
                    self._drop(verdict, counts)
        finally:
            self._carried += [_Waiting(accepted[index], step) for index in sorted(accepted)]
            self._outstanding += waiting.values()
            self._learn(len(accepted), len(prompts) - len(waiting))

    def _learn(self, accepted: int, judged: int) -> None:
        decay = 0.5 ** (judged / (HALF_LIFE_BATCHES * self.batch_prompts))
        self._accepted = self._accepted * decay + accepted
        self._judged = self._judged * decay + judged

    def _drop_stale(self, step: int, counts: Counts) -> None:
        fresh = [waiting for waiting in self._carried if step - waiting.step <= self.config.max_age]
        counts.dropped_stale += len(self._carried) - len(fresh)
        self._carried = fresh

    def _give_up(self, step: int, waves: int, exhausted: bool) -> None:
        """The batch is not full: say so, and stop where the settings ask for it."""
        kept, why = len(self._carried), "the data ended" if exhausted else f"sampling.max_batches={self.config.max_batches} waves are used up"
        told = f"step {step}: {kept} of {self.batch_prompts} groups are informative after {waves} waves, and {why}"
        if self.config.on_exhausted == "stop" and not exhausted:
            raise StoppedEarly(f"{told}; what was kept is saved (easier or harder prompts, or a larger sampling.max_batches, would help)")
        self.log(f"{told}; training on {kept}" if kept else f"{told}; no update in this step")

    def _close(self, step: int, policy_version: int, counts: Counts, acceptance: float, partial: bool, exhausted: bool) -> Collected:
        """Hand out the oldest groups; what is left waits, unless it would be too old by the next step."""
        groups = [waiting.group for waiting in self._carried[: self.batch_prompts]]
        self._carried = self._carried[self.batch_prompts :]
        self._drop_stale(step + 1, counts)
        counts.trained, counts.carried_out = len(groups), len(self._carried)
        self._unfinished = None
        oldest = min((group.policy_version for group in groups), default=policy_version)
        return Collected(groups, counts, acceptance, oldest, partial, exhausted)

    @staticmethod
    def _kept(counts: Counts) -> int:
        """Groups of the step that passed the filter so far."""
        return counts.sampled - (counts.dropped_all_right + counts.dropped_all_wrong + counts.dropped_unjudged + counts.dropped_incomplete)

    @staticmethod
    def _drop(verdict: str, counts: Counts) -> None:
        name = f"dropped_{verdict}"
        setattr(counts, name, getattr(counts, name) + 1)
