"""The DAPO loss: values and gradients by hand, and the same sums for every cut into micro-batches."""

import math
import pickle

import pytest
import torch

from rlcli.algorithms.aggregate import KINDS, token_weights
from rlcli.algorithms.base import Tokens
from rlcli.algorithms.dapo import DapoLoss, summarise
from rlcli.algorithms.kl import k1, k2, k3
from rlcli.errors import UserError


def make(logprobs, entropy=None, requires_grad=True, **fields):
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=requires_grad)
    count = len(logprobs)
    entropy = None if entropy is None else torch.tensor(entropy, dtype=torch.float64)
    fields = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return Tokens(logprobs, entropy, torch.zeros(count, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), fields)


def ratio_tokens(ratios, advantage, weight=None, **fields):
    return make([math.log(r) for r in ratios], advantage=advantage, weight=weight or [1.0] * len(ratios), old_logprobs=[0.0] * len(ratios), **fields)


def test_clip_by_hand():
    # A = +1: 1.5 is cut to 1.28 (no gradient), 0.5 is not; A = -2: 0.5 is cut to 0.8, 1.5 is not
    tokens = ratio_tokens([1.5, 0.5, 0.5, 1.5], [1.0, 1.0, -2.0, -2.0])
    out = DapoLoss()(tokens)
    assert out.loss.item() == pytest.approx(-1.28 - 0.5 + 1.6 + 3.0)
    out.loss.backward()
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([0.0, -0.5, 0.0, 3.0])  # d loss / d logp = -A x ratio where not cut
    means = summarise({name: value.item() for name, value in out.sums.items()})
    assert (means["clip_high"], means["clip_low"], means["ratio"], means["tokens"]) == pytest.approx((0.25, 0.25, 1.0, 4.0))
    assert means["kl"] == pytest.approx((2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))) / 4)
    assert out.maxima["ratio_max"].item() == pytest.approx(1.5)


def test_dual_clip_by_hand():
    # A = -1, ratio 4: the loss 4 is cut to c = 3, without a gradient; ratio 2 is below c
    tokens = ratio_tokens([4.0, 2.0, 4.0], [-1.0, -1.0, 1.0])
    out = DapoLoss(dual_clip=3.0)(tokens)
    assert out.loss.item() == pytest.approx(3.0 + 2.0 - 1.28)
    out.loss.backward()
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert out.sums["clip_dual"].item() == 1


def test_old_is_current_has_ratio_one_and_the_policy_gradient():
    tokens = make([-1.0, -2.0], advantage=[2.0, -3.0], weight=[0.25, 0.5])
    out = DapoLoss(old_is_current=True)(tokens)
    assert out.loss.item() == -0.5 + 1.5
    out.loss.backward()
    assert tokens.logprobs_N.grad.tolist() == [-0.5, 1.5]  # -weight x advantage
    assert out.sums["kl"].item() == 0.0


def test_corrections_by_hand():
    # old / rollout = 4, 1.5, 0.25 with a bound of 2
    fields = {"advantage": [1.0] * 3, "weight": [1.0] * 3, "old_logprobs": [-3.0] * 3}
    rollout = [-3.0 - math.log(w) for w in (4.0, 1.5, 0.25)]
    clip = DapoLoss(correction="token_clip")(make([-3.0] * 3, rollout_logprobs=rollout, **fields))
    assert clip.loss.item() == pytest.approx(-(2.0 + 1.5 + 0.25))
    assert clip.sums["correction_clipped"].item() == 1
    assert clip.sums["correction"].item() == pytest.approx(3.75)
    mask = DapoLoss(correction="token_mask")(make([-3.0] * 3, rollout_logprobs=rollout, **fields))
    assert mask.loss.item() == pytest.approx(-1.5)
    assert mask.sums["correction_clipped"].item() == 2
    assert mask.sums["gap"].item() == pytest.approx(2 * math.log(4) + math.log(1.5))
    assert mask.sums["gap_exp"].item() == pytest.approx(4 + 1.5 + 0.25)
    assert mask.maxima["gap_max"].item() == pytest.approx(math.log(4))
    with pytest.raises(KeyError, match="rollout_logprobs"):
        DapoLoss(correction="token_clip")(make([-3.0] * 3, **fields))


def test_entropy_bonus_uses_the_same_weights():
    tokens = make([-1.0, -1.0], entropy=[2.0, 5.0], advantage=[0.0, 0.0], weight=[0.5, 0.25])
    out = DapoLoss(entropy_coef=0.1, old_is_current=True)(tokens)
    assert out.loss.item() == pytest.approx(-0.1 * (1.0 + 1.25))
    assert DapoLoss(entropy_coef=0.1).needs_entropy
    assert not DapoLoss().needs_entropy
    assert summarise({k: v.item() for k, v in out.sums.items()})["entropy"] == pytest.approx(3.5)


def test_untrained_tokens_count_nowhere_even_when_broken():
    clean = make([-1.0], advantage=[1.0], weight=[1.0], old_logprobs=[-1.5], rollout_logprobs=[-1.2])
    inf, nan = math.inf, math.nan
    dirty = make([-inf, -1.0, nan], advantage=[nan, 1.0, inf], weight=[0.0, 1.0, 0.0], old_logprobs=[-inf, -1.5, 0.0], rollout_logprobs=[nan, -1.2, 0.0])
    loss = DapoLoss(correction="token_clip")
    a, b = loss(clean), loss(dirty)
    assert {k: v.item() for k, v in a.sums.items()} == {k: v.item() for k, v in b.sums.items()}
    b.loss.backward()
    assert dirty.logprobs_N.grad[[0, 2]].tolist() == [0.0, 0.0]


def test_no_trainable_token_gives_zero_and_no_nan():
    tokens = make([-1.0, -2.0], advantage=[1.0, 1.0], weight=[0.0, 0.0], old_logprobs=[0.0, 0.0])
    out = DapoLoss()(tokens)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert tokens.logprobs_N.grad.tolist() == [0.0, 0.0]
    assert all(value.item() == 0.0 for value in [*out.sums.values(), *out.maxima.values()])
    assert summarise({k: v.item() for k, v in out.sums.items()}) == {"loss": 0.0, "tokens": 0.0}


def test_wild_ratio_stays_finite():
    out = DapoLoss()(make([0.0, -500.0], advantage=[-1.0, -1.0], weight=[0.5, 0.5], old_logprobs=[-500.0, 0.0]))
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(value) for value in out.sums.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_sums_and_gradients_do_not_depend_on_micro_batches(kind, cut):
    """Five groups of two samples of unequal lengths, cut into micro-batches of `cut` groups; one parameter stands for the model."""
    generator = torch.Generator().manual_seed(3)
    lengths = [[3, 7], [1, 0], [12, 2], [4, 4], [6, 1]]
    weights = token_weights(kind, lengths, 16)
    loss = DapoLoss(entropy_coef=0.01, correction="token_clip", dual_clip=3.0)
    theta = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    groups = []
    for counts, row in zip(lengths, weights, strict=True):
        count = sum(counts)
        features = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        fields = {
            "weight": torch.tensor([w for w, n in zip(row, counts, strict=True) for _ in range(n)], dtype=torch.float64),
            "advantage": torch.randn(count, generator=generator, dtype=torch.float64),
            "old_logprobs": -torch.rand(count, generator=generator, dtype=torch.float64),
            "rollout_logprobs": -torch.rand(count, generator=generator, dtype=torch.float64),
        }
        groups.append((features, fields))

    def run(size):
        theta.grad, total = None, {}
        for start in range(0, len(groups), size):
            part = groups[start : start + size]
            x = torch.cat([features for features, _ in part])
            fields = {name: torch.cat([f[name] for _, f in part]) for name in part[0][1]}
            tokens = Tokens(-(x @ theta).abs(), (x @ theta).cos(), torch.zeros(len(x), dtype=torch.int64), torch.zeros(1), fields)
            out = loss(tokens)
            out.loss.backward()
            for name, value in out.sums.items():
                total[name] = total.get(name, 0.0) + value.double().item()
        return theta.grad.clone(), total

    whole_grad, whole = run(len(groups))
    grad, sums = run(cut)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-12, atol=1e-15)
    assert sums == pytest.approx(whole, rel=1e-5)


def test_kl_estimators_by_hand():
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k2(p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(p, q).item() == pytest.approx(0.5 - 1 + math.log(2))
    assert k3(q, p).item() == pytest.approx(2 - 1 - math.log(2))
    assert k3(torch.tensor([-1000.0]), torch.tensor([0.0])).item() == 10.0


def test_k1_and_k3_estimate_the_kl():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k1(p.log(), q.log())).sum(), exact)
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), exact)


def test_settings_survive_pickling_and_are_checked():
    loss = DapoLoss(clip_low=0.1, correction="token_mask", old_is_current=True)
    assert pickle.loads(pickle.dumps(loss)) == loss
    with pytest.raises(UserError, match="dual_clip"):
        DapoLoss(dual_clip=0.5)
    with pytest.raises(UserError, match="correction"):
        DapoLoss(correction="clip")
