"""Dynamic sampling: what is kept, dropped and carried over, by hand and by properties over random runs."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.config.schema import SamplingConfig
from rlcli.errors import StoppedEarly, UserError
from rlcli.trainers.sampler import MOST_BATCHES_A_WAVE, Counts, Sampler, outcome
from rlcli.types import Group, Prompt, Sample, Verdict

G = 2
KINDS = ("kept", "all_right", "all_wrong", "unjudged", "incomplete", "silent")


def group_of(prompt, kind, version=0):
    """A group with the outcome asked for; its log-probs carry the version, so that mix-ups would show."""
    right = {"kept": [True, False], "all_right": [True, True]}.get(kind, [False, False])
    reasons = ["timeout", "crashed"] if kind == "unjudged" else ["correct" if r else "wrong" for r in right]
    finish = "abort" if kind == "incomplete" else "stop"
    samples = [Sample(np.arange(i + 1, dtype=np.int32), np.full(i + 1, -0.1 * (version + 1), np.float32), finish, version) for i in range(G)]
    return Group(prompt, samples, [Verdict(float(r), r, str(r), why) for r, why in zip(right, reasons, strict=True)])


class World:
    """Endless (or finite) prompts whose outcomes are given by number; answers come back in reverse order."""

    def __init__(self, kinds, size=None, at=0):
        self.kinds, self.size, self.at, self.version, self.waves, self.seen, self.fail_after = kinds, size, at, 0, [], [], None

    def take(self, k):
        end = self.at + k if self.size is None else min(self.at + k, self.size)
        prompts = [Prompt(i, np.full(3, i, np.int32), "a", {"n": i}) for i in range(self.at, end)]
        self.at = end
        return prompts

    def generate(self, prompts):
        self.waves.append(len(prompts))
        for count, index in enumerate(reversed(range(len(prompts)))):
            if self.fail_after is not None and count >= self.fail_after:
                raise RuntimeError("worker died")
            kind = self.kinds[prompts[index].id % len(self.kinds)]
            if kind == "silent" and prompts[index].id not in self.seen:  # no answer the first time it is asked
                self.seen.append(prompts[index].id)
                continue
            yield index, group_of(prompts[index], "kept" if kind == "silent" else kind, self.version)


def sampler(world, batch=4, log=lambda text: None, **config):
    return Sampler(SamplingConfig(**config), batch, G, world.take, world.generate, log)


def ids(groups):
    return [group.prompt.id for group in groups]


def dropped(counts):
    return sum(value for name, value in asdict(counts).items() if name.startswith("dropped_"))


def same(a, b):
    return json.dumps(a[0]) == json.dumps(b[0]) and a[1].keys() == b[1].keys() and all(np.array_equal(a[1][k], b[1][k]) for k in a[1])


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_outcomes(kind):
    assert outcome(group_of(None, kind), G) == kind


def test_outcome_ignores_scores_and_faults_of_the_verifier():
    shaped = group_of(None, "all_wrong")
    shaped.verdicts[0].score = -7.5  # a penalty gives the rewards a spread; the group stays uninformative
    assert outcome(shaped, G) == "all_wrong"
    faulty = group_of(None, "kept")
    faulty.verdicts[1].reason = "timeout"  # right and unknown is not right and wrong
    assert outcome(faulty, G) == "all_right"
    assert outcome(group_of(None, "kept"), G + 1) == "incomplete"


def test_waves_follow_the_acceptance_and_order_is_the_prompts():
    world = World(["kept", "all_right", "all_wrong", "all_wrong"])  # one in four
    s = sampler(world, batch=4)
    first = s.collect(0, 0)
    # first wave: 4 prompts, 1 kept; estimate (1 + 1) / (4 + 1), so 3 more ask for ceil(3 / 0.4) = 8 prompts, of which 2 are kept.
    # 8 prompts are one half-life of a batch of 4: (0.5 + 2 + 1) / (2 + 8 + 1) = 0.318, so the last one asks for ceil(3.14) = 4.
    assert world.waves == [4, 8, 4]
    assert ids(first.groups) == [0, 4, 8, 12]
    assert (first.counts.sampled, first.acceptance) == (16, 4 / 16)
    assert (first.counts.dropped_all_right, first.counts.dropped_all_wrong) == (4, 8)


def test_surplus_goes_to_the_next_step_oldest_first_and_ages():
    world = World(["kept"])
    s = sampler(world, batch=2, oversample=2.0, max_age=1)
    first = s.collect(0, 0)  # 4 prompts for 2 groups
    assert (ids(first.groups), first.counts.carried_out) == ([0, 1], 2)
    world.version = 1
    second = s.collect(1, 1)
    assert (ids(second.groups), second.counts.sampled, second.counts.carried_in) == ([2, 3], 0, 2)
    assert (second.oldest_version, math.isnan(second.acceptance)) == (0, True)


def test_surplus_too_old_is_dropped_and_counted():
    world = World(["kept"])
    s = sampler(world, batch=1, oversample=4.0, max_age=1)
    assert s.collect(0, 0).counts.carried_out == 3
    second = s.collect(1, 1)  # takes one of the three; the others would be two steps old by step 2
    assert (second.counts.dropped_stale, second.counts.carried_out) == (2, 0)
    none = sampler(World(["kept"]), batch=1, oversample=4.0, max_age=0)
    assert none.collect(0, 0).counts.dropped_stale == 3


def test_max_batches_trains_on_what_there_is():
    said = []
    s = sampler(World(["all_wrong", "all_wrong", "kept"]), batch=100, log=said.append, max_batches=1)
    out = s.collect(7, 0)
    assert (out.partial, out.exhausted, len(out.groups), out.counts.waves) == (True, False, 33, 1)
    assert said == ["step 7: 33 of 100 groups are informative after 1 waves, and sampling.max_batches=1 waves are used up; training on 33"]


def test_no_group_at_all_is_a_step_without_update():
    said = []
    out = sampler(World(["all_wrong"]), log=said.append, max_batches=2).collect(0, 3)
    assert (out.groups, out.partial, out.acceptance, out.oldest_version) == ([], True, 0.0, 3)
    assert out.counts.dropped_all_wrong == out.counts.sampled > 0
    assert "no update" in said[0]


def test_stop_keeps_everything_and_goes_on():
    world = World(["kept", "all_wrong", "all_wrong", "all_wrong"])
    s = sampler(world, batch=4, max_batches=1, on_exhausted="stop")
    with pytest.raises(StoppedEarly, match="step 0: 1 of 4 groups"):
        s.collect(0, 0)
    values, arrays = s.state()
    later = sampler(world, batch=4, max_batches=10)
    later.restore(json.loads(json.dumps(values)), arrays)
    out = later.collect(0, 0)
    assert ids(out.groups) == [0, 4, 8, 12]
    assert out.counts.sampled == out.counts.trained + out.counts.carried_out + dropped(out.counts)  # of both attempts


def test_end_of_data_in_mid_batch_loses_nothing():
    world = World(["kept"], size=6)
    s = sampler(world, batch=4)
    assert ids(s.collect(0, 0).groups) == [0, 1, 2, 3]
    last = s.collect(1, 1)
    assert (ids(last.groups), last.partial, last.exhausted) == ([4, 5], True, True)
    assert s.collect(2, 2).groups == []


def test_a_dead_worker_keeps_accepted_groups_and_asks_the_others_again():
    world = World(["kept"])
    s = sampler(world, batch=4)
    world.fail_after = 3  # answers for prompts 3, 2, 1; not for 0
    with pytest.raises(RuntimeError, match="worker died"):
        s.collect(0, 0)
    world.fail_after = None
    out = s.collect(0, 0)
    assert ids(out.groups) == [1, 2, 3, 0]
    assert world.waves == [4, 1]
    assert (out.counts.sampled, out.counts.trained) == (4, 4)


def test_a_failing_cursor_loses_no_outstanding_prompt():
    world = World(["kept"])
    s = sampler(world, batch=2)
    world.fail_after = 1
    with pytest.raises(RuntimeError, match="worker died"):
        s.collect(0, 0)
    good, s.batch_prompts = s.take, 4
    s.take = lambda k: (_ for _ in ()).throw(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        s.collect(0, 0)
    s.take, world.fail_after = good, None
    assert ids(s.collect(0, 0).groups) == [1, 0, 2, 3]


def test_without_filter_everything_judged_is_kept():
    world = World(["kept", "all_right", "all_wrong", "unjudged"])
    out = sampler(world, batch=4, enabled=False, oversample=3.0).collect(0, 0)
    assert ids(out.groups) == [0, 1, 2, 4]
    assert world.waves == [4, 1]
    assert out.counts.dropped_unjudged == 1


def test_groups_of_one_are_refused():
    with pytest.raises(UserError, match="samples_per_prompt=1"):
        Sampler(SamplingConfig(), 4, 1, lambda k: [], lambda p: iter(()))
    Sampler(SamplingConfig(enabled=False), 4, 1, lambda k: [], lambda p: iter(()))


runs = st.fixed_dictionaries({
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    "batch": st.integers(1, 6),
    "max_age": st.integers(0, 3),
    "max_batches": st.integers(1, 5),
    "oversample": st.sampled_from([1.0, 1.5, 4.0]),
    "enabled": st.booleans(),
    "size": st.one_of(st.none(), st.integers(0, 60)),
})


@settings(max_examples=150, deadline=None)
@given(runs)
def test_accounting_of_random_runs(run):
    kinds, batch, size = run.pop("kinds"), run.pop("batch"), run.pop("size")
    world = World(kinds, size)
    s = sampler(world, batch, **run)
    trained, total, carried = [], Counts(), 0
    for step in range(6):
        world.version = step
        out = s.collect(step, step)
        c = out.counts
        assert len(out.groups) == c.trained
        assert out.partial == (len(out.groups) < batch)
        assert c.carried_in == carried
        assert c.sampled + c.carried_in == c.trained + c.carried_out + dropped(c)
        assert c.waves <= run["max_batches"]
        assert all(step - group.policy_version <= run["max_age"] for group in out.groups)
        assert [g.policy_version for g in out.groups] == sorted(g.policy_version for g in out.groups)  # oldest first
        assert run["enabled"] is False or all(outcome(group, G) == "kept" for group in out.groups)
        carried = c.carried_out
        trained += ids(out.groups)
        total = Counts(**{name: value + getattr(c, name) for name, value in asdict(total).items()})
    assert len(trained) == len(set(trained))  # nothing is trained on twice
    assert max(world.waves, default=0) <= MOST_BATCHES_A_WAVE * batch
    outstanding = len(s.state()[0]["outstanding"])
    assert world.at == total.sampled + outstanding == total.trained + carried + dropped(total) + outstanding


@settings(max_examples=100, deadline=None)
@given(runs, st.sets(st.integers(0, 5)), st.integers(0, 5))
def test_restoring_is_as_if_never_interrupted(run, at, fail_step):
    kinds, batch, size = run.pop("kinds"), run.pop("batch"), run.pop("size")

    def play(saves):
        world = World(kinds, size)
        s, seen = sampler(world, batch, **run), []
        for step in range(6):
            world.version = step
            if step == fail_step:
                world.fail_after = 1
                try:
                    s.collect(step, step)
                except RuntimeError:
                    seen.append("died")
                world.fail_after = None
            if step in saves:
                values, arrays = s.state()
                other = sampler(world, batch, **run)
                other.restore(json.loads(json.dumps(values)), {name: array.copy() for name, array in arrays.items()})
                assert same(other.state(), (values, arrays))
                s = other
            out = s.collect(step, step)
            seen.append((ids(out.groups), asdict(out.counts), repr(out.acceptance), [g.samples[1].logprobs.tolist() for g in out.groups]))
        return seen, s.state()

    plain, interrupted = play(set()), play(at)
    assert plain[0] == interrupted[0]
    assert same(plain[1], interrupted[1])
