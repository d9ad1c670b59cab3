"""Preference losses: values and gradients by hand, and the same sums for every cut into micro-batches."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlcli.algorithms.base import Tokens
from rlcli.algorithms.dpo import DpoLoss, summarise
from rlcli.algorithms.pairs import divergence_scores, tokens_of
from rlcli.algorithms.preference import RULES
from rlcli.errors import UserError
from rlcli.types import TrainRow


def sig(x):
    return 1 / (1 + math.exp(-x))


def make(answers, refs=None, mask=None, dtype=torch.float64, **more):
    """Tokens of samples given as lists of log-probs, chosen and rejected in turn."""
    flat = lambda parts: torch.tensor([x for part in parts for x in part], dtype=dtype)  # noqa: E731
    logprobs = flat(answers).requires_grad_()
    sample = torch.tensor([i for i, part in enumerate(answers) for _ in part])
    fields = {name: flat(value) for name, value in {"ref_logprobs": refs, "mask": mask, **more}.items() if value is not None}
    return Tokens(logprobs, None, sample, torch.arange(len(answers)) // 2, fields)


def pair(chosen, rejected, **more):
    """One pair of one-token answers with the given log-ratios: log-probs -2 + chosen and -2.5 + rejected."""
    return make([[-2.0 + chosen], [-2.5 + rejected]], [[-2.0], [-2.5]], **more)


C, R, BETA, E = 0.6, -0.4, 0.5, 0.1  # beta (c - r) = 0.5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"losses": ("sigmoid",)}, -math.log(sig(0.5))),
        ({"losses": ("sigmoid",), "label_smoothing": E}, -0.9 * math.log(sig(0.5)) - 0.1 * math.log(sig(-0.5))),
        ({"losses": ("sigmoid",), "margin": 0.2}, -math.log(sig(0.3))),
        ({"losses": ("hinge",)}, 0.5),
        ({"losses": ("hinge",), "margin": -1.0}, 0.0),
        ({"losses": ("ipo",)}, 0.0),  # c - r = 1 = 1 / (2 beta): the target itself
        ({"losses": ("ipo",), "beta": 0.25}, 1.0),  # (1 - 2)^2
        ({"losses": ("robust",), "label_smoothing": E}, (-0.9 * math.log(sig(0.5)) + 0.1 * math.log(sig(-0.5))) / 0.8),
        (
            {"losses": ("exo_pair",), "label_smoothing": E},
            sig(0.5) * math.log(sig(0.5) / 0.9) + sig(-0.5) * math.log(sig(-0.5) / 0.1),
        ),
        ({"losses": ("nca_pair",)}, -math.log(sig(0.3)) - 0.5 * math.log(sig(-0.3)) - 0.5 * math.log(sig(0.2))),
        ({"losses": ("sppo_hard",)}, (0.6 - 1.0) ** 2 + (-0.4 + 1.0) ** 2),
        ({"losses": ("apo_zero",)}, 1 - sig(0.3) + sig(-0.2)),
        ({"losses": ("apo_down",)}, sig(0.3) + 1 - sig(0.5)),
        ({"losses": ("discopop",)}, sig(-10.0) * -math.log(sig(0.5)) + sig(10.0) * math.exp(-0.5)),
        ({"losses": ("simpo",)}, -math.log(sig(0.5 * (-1.4 + 2.9)))),
        ({"losses": ("simpo",), "margin": 0.25}, -math.log(sig(0.5))),
        (
            {"losses": ("orpo",)},
            1.4 - 0.5 * math.log(sig(math.log(math.exp(-1.4) / (1 - math.exp(-1.4))) - math.log(math.exp(-2.9) / (1 - math.exp(-2.9))))),
        ),
        ({"losses": ("sigmoid", "hinge"), "weights": (2.0, 0.5)}, -2 * math.log(sig(0.5)) + 0.25),
        ({"losses": ("sigmoid",), "sft_coef": 0.3}, -math.log(sig(0.5)) + 0.3 * 1.4),
        ({"losses": ("sigmoid",), "divergence": "forward_kl"}, -math.log(sig(0.5 * (math.exp(0.4) - math.exp(-0.6))))),
        (
            {"losses": ("sigmoid",), "divergence": "js"},
            -math.log(sig(0.5 * (math.log(2 * math.exp(0.6) / (1 + math.exp(0.6))) - math.log(2 * math.exp(-0.4) / (1 + math.exp(-0.4)))))),
        ),
        (
            {"losses": ("sigmoid",), "divergence": "alpha", "alpha": 0.5},
            -math.log(sig(0.5 * ((math.exp(-0.3) - 1) / -0.5 - (math.exp(0.2) - 1) / -0.5))),
        ),
        ({"losses": ("sigmoid",), "divergence": "alpha", "alpha": 1.0}, -math.log(sig(0.5))),
    ],
)
def test_values_by_hand(settings, expected):
    loss = DpoLoss(**{"beta": BETA, **settings})
    assert loss(pair(C, R)).loss.item() == pytest.approx(expected, abs=1e-9)


def test_gathered_losses_by_hand():
    """Two pairs: c = 0.6, 0.2; r = -0.4, 0.8; policy margins u = 1.5, -0.1 (of -1.4, -1.8 and -2.9, -1.7), reference margins v = 0.5, 0.5."""
    rows = [TrainRow(np.zeros(1, np.int32), [np.zeros(1, np.int32)] * 2, {"ref_logprobs": [np.float32([-2.0]), np.float32([-2.5])]}) for _ in "ab"]
    logprobs = [[np.float32([-1.4]), np.float32([-2.9])], [np.float32([-1.8]), np.float32([-1.7])]]

    def value(name):
        return DpoLoss(losses=(name,), beta=0.5).measure(rows, logprobs)["loss"]

    shift = 0.5 * (0.6 + 0.2 - 0.4 + 0.8) / 4
    bco = [-math.log(sig(0.3 - shift)) - math.log(sig(shift + 0.2)), -math.log(sig(0.1 - shift)) - math.log(sig(shift - 0.4))]
    assert value("bco_pair") == pytest.approx(sum(bco) / 2, rel=1e-6)
    kl_c, kl_r = 0.4, 0.2
    kto = [1 - sig(0.5 * (0.6 - kl_r)) + 1 - sig(0.5 * (kl_c + 0.4)), 1 - sig(0.5 * (0.2 - kl_r)) + 1 - sig(0.5 * (kl_c - 0.8))]
    assert value("kto_pair") == pytest.approx(sum(kto) / 4, rel=1e-6)
    assert value("aot") == pytest.approx((-math.log(sig(0.5 * (1.5 - 0.5))) - math.log(sig(0.5 * (-0.1 - 0.5)))) / 2, rel=1e-6)
    # sorted: c 0.2, 0.6; r -0.4, 0.8
    assert value("aot_unpaired") == pytest.approx((-math.log(sig(0.5 * 0.6)) - math.log(sig(0.5 * -0.2))) / 2, rel=1e-6)


def test_sigmoid_gradient_by_hand():
    tokens = make([[-1.0, -0.5], [-2.0]], [[-1.1, -0.7], [-1.9]])  # c = 0.3, r = -0.1, z = 0.2
    DpoLoss(beta=0.5, pairs=4)(tokens).loss.backward()
    slope = -0.5 * sig(-0.2) / 4
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([slope, slope, -slope])


@pytest.mark.parametrize("name", sorted(RULES))
def test_policy_equal_to_reference(name):
    """Exact in float32: margins 0, and the logistic losses ln 2."""
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 3, 12, 5]
    logprobs = [[-(5 * torch.rand(n, generator=generator)).numpy().astype(np.float32) for n in lengths[i : i + 2]] for i in (0, 2)]
    rows = [TrainRow(np.zeros(2, np.int32), [np.zeros(len(p), np.int32) for p in row], {"ref_logprobs": row}) for row in logprobs]
    loss = DpoLoss(losses=(name,), label_smoothing=0.001 if name == "exo_pair" else 0.0)
    out = loss.measure(rows, logprobs)
    assert all(math.isfinite(value) for value in out.values())
    ln2 = np.float32(math.log(2)).item()
    exact = {"sigmoid": ln2, "sigmoid_norm": ln2, "robust": ln2, "aot": ln2, "hinge": 1.0, "apo_zero": 1.0, "apo_down": 1.0, "kto_pair": 0.5}
    if name in exact:
        assert out["loss"] == exact[name]
    if loss.needs_reference:
        assert (out["margin"], out["reward_chosen"], out["reward_rejected"], out["accuracy"], out["kl"]) == (0.0, 0.0, 0.0, 0.5, 0.0)


def softplus(x):
    return math.log1p(math.exp(x))


def log_odds(logp):
    return logp - math.log(1 - math.exp(logp))


# Each loss of one pair of one-token answers as a function of the log-ratios c and r, in plain numbers; log-probs are c - 2 and r - 2.5.
# What losses take from the mini-batch as a whole (of a single pair here) is fixed at C, R, as it has no gradient.
SHIFT = BETA * (C + R) / 2
SCALARS = {
    "sigmoid": lambda c, r: softplus(-BETA * (c - r)),
    "sigmoid_norm": lambda c, r: softplus(-BETA * (c - r)),
    "hinge": lambda c, r: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r: (c - r - 1 / (2 * BETA)) ** 2,
    "robust": lambda c, r: (0.9 * softplus(-BETA * (c - r)) - 0.1 * softplus(BETA * (c - r))) / 0.8,
    "exo_pair": lambda c, r: sum(p * math.log(p / q) for p, q in ((sig(BETA * (c - r)), 0.9), (sig(BETA * (r - c)), 0.1))),
    "nca_pair": lambda c, r: softplus(-BETA * c) + (softplus(BETA * c) + softplus(BETA * r)) / 2,
    "bco_pair": lambda c, r: softplus(SHIFT - BETA * c) + softplus(BETA * r - SHIFT),
    "sppo_hard": lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "aot": lambda c, r: softplus(-BETA * ((c - 2) - (r - 2.5) - 0.5)),
    "aot_unpaired": lambda c, r: softplus(-BETA * (c - r)),
    "apo_zero": lambda c, r: sig(-BETA * c) + sig(BETA * r),
    "apo_down": lambda c, r: sig(BETA * c) + sig(BETA * (r - c)),
    "discopop": lambda c, r: sig(-20 * BETA * (c - r)) * softplus(-BETA * (c - r)) + sig(20 * BETA * (c - r)) * math.exp(-BETA * (c - r)),
    "simpo": lambda c, r: softplus(-BETA * (c - 2 - r + 2.5)),
    "orpo": lambda c, r: 2 - c + BETA * softplus(log_odds(r - 2.5) - log_odds(c - 2)),
    "kto_pair": lambda c, r: (sig(BETA * (max(R, 0) - c)) + sig(BETA * (r - max(C, 0)))) / 2,
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_value_and_gradient_by_hand(name):
    """The gradient is that of the formula in plain numbers, by central differences."""
    loss = DpoLoss(losses=(name,), beta=BETA, label_smoothing=E if name in ("robust", "exo_pair") else 0.0)
    tokens = pair(C, R)
    if loss.needs_gather:
        row = TrainRow(np.zeros(1, np.int32), [np.zeros(1, np.int32)] * 2, {"ref_logprobs": [np.float32([-2.0]), np.float32([-2.5])]})
        (row,) = loss.gathered([row], [[np.float32([-2 + C]), np.float32([-2.5 + R])]])
        tokens = pair(C, R, **{key: [values.tolist() for values in row.fields[key]] for key in row.fields if key != "ref_logprobs"})
    out = loss(tokens).loss
    out.backward()
    step, scalar = 1e-5, SCALARS[name]
    assert out.item() == pytest.approx(scalar(C, R), abs=1e-6)
    by_c = (scalar(C + step, R) - scalar(C - step, R)) / (2 * step)
    by_r = (scalar(C, R + step) - scalar(C, R - step)) / (2 * step)
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([by_c, by_r], abs=1e-6)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize(("chosen", "rejected"), [(-3000.0, -1.0), (-1.0, -3000.0), (-3000.0, -3000.0), (-1e-7, -1e-7)])
def test_answers_far_from_the_reference_have_a_finite_loss_and_gradient(name, chosen, rejected):
    loss = DpoLoss(losses=(name,), beta=1.0, label_smoothing=0.001 if name == "exo_pair" else 0.0)
    reference = [np.float32([-2.0]), np.float32([-2.5])]
    rows = [TrainRow(np.zeros(1, np.int32), [np.zeros(1, np.int32)] * 2, {"ref_logprobs": reference})]
    logprobs = [[np.float32([chosen]), np.float32([rejected])]]
    rows = loss.gathered(rows, logprobs) if loss.needs_gather else rows
    tokens = tokens_of(rows, logprobs)
    tokens.logprobs_N.requires_grad_()
    out = loss(tokens)
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert torch.isfinite(tokens.logprobs_N.grad).all()


def test_masks_lengths_and_ld_alpha_by_hand():
    answers, mask = [[-1.0, -9.0, -2.0, -4.0], [-3.0, -1.0]], [[1, 0, 1, 1], [1, 1]]
    tokens = make(answers, [[0.0] * 4, [0.0] * 2], mask)
    # chosen covers -1, -2, -4 (three tokens), rejected -3, -1
    assert DpoLoss(beta=1.0)(tokens).loss.item() == pytest.approx(-math.log(sig(-7 + 4)))
    assert DpoLoss(losses=("sigmoid_norm",), beta=1.0)(tokens).loss.item() == pytest.approx(-math.log(sig(-7 / 3 + 2)))
    assert DpoLoss(beta=1.0, length_normalise=True)(tokens).loss.item() == pytest.approx(-math.log(sig(-7 / 3 + 2)))
    assert DpoLoss(losses=("ipo",), beta=1.0, length_normalise=False)(tokens).loss.item() == pytest.approx((-3 - 0.5) ** 2)
    # beyond the shorter answer's two tokens only -4 is left, at weight 0.25
    assert DpoLoss(beta=1.0, ld_alpha=0.25)(tokens).loss.item() == pytest.approx(-math.log(sig(-4 + 4)))
    assert DpoLoss(beta=1.0, sft_coef=1.0, ld_alpha=0.25)(tokens).loss.item() == pytest.approx(math.log(2) + 7 / 3)


def test_what_the_mask_covers_up_counts_nowhere():
    nan = math.nan
    dirty = make([[-1.0, nan], [-math.inf, -2.0]], [[-1.5, 0.0], [nan, -1.0]], [[1, 0], [0, 1]])
    clean = make([[-1.0], [-2.0]], [[-1.5], [-1.0]])
    for settings in ({}, {"ld_alpha": 0.5}, {"losses": ("ipo",)}):
        a, b = DpoLoss(**settings)(clean), DpoLoss(**settings)(dirty)
        assert {k: v.item() for k, v in a.sums.items()} == {k: v.item() for k, v in b.sums.items()}
    b.loss.backward()
    assert dirty.logprobs_N.grad[[1, 2]].tolist() == [0.0, 0.0]


def test_metrics_by_hand():
    tokens = make([[-1.0, -1.0], [-3.0], [-2.0], [-1.0, -2.0, -3.0]], [[-2.0, -1.0], [-2.0], [-1.0], [-2.0, -2.0, -3.0]])
    out = DpoLoss(beta=0.5, pairs=2)(tokens)  # c = 1, -1; r = -1, 1
    means = summarise({name: value.item() for name, value in out.sums.items()})
    assert means == pytest.approx({
        "loss": (-math.log(sig(1)) - math.log(sig(-1))) / 2, "pairs": 2, "reward_chosen": 0, "reward_rejected": 0, "margin": 0, "accuracy": 0.5,
        "logp_chosen": -2, "logp_rejected": -4.5, "token_logp_chosen": -1.5, "token_logp_rejected": -2.5, "tokens_chosen": 1.5, "tokens_rejected": 2,
        "kl": (2 * math.exp(-1) + 2 * (math.exp(1) - 2)) / 7,  # k3 of +1, -1, -1, +1 over seven tokens
    })  # fmt: skip
    assert summarise({"loss": 0.0, "pairs": 0.0}) == {"loss": 0.0, "pairs": 0.0}


def whole_batch(name, c, r, u, v, nll, avg, beta):
    """The loss of all pairs at once, straight from its definition, with torch's own sort and means."""
    z = beta * (c - r)
    return {
        "bco_pair": lambda: -F.logsigmoid(beta * c - beta * torch.cat([c, r]).mean().detach()) - F.logsigmoid(beta * torch.cat([c, r]).mean().detach() - beta * r),
        "kto_pair": lambda: 0.5 * ((1 - F.sigmoid(beta * (c - r.mean().relu().detach()))) + 1 - F.sigmoid(beta * (c.mean().relu().detach() - r))),
        "aot": lambda: -F.logsigmoid(beta * (u.sort().values - v.sort().values)),
        "aot_unpaired": lambda: -F.logsigmoid(beta * (c.sort().values - r.sort().values)),
        "sigmoid": lambda: -F.logsigmoid(z),
        "simpo": lambda: -F.logsigmoid(beta * (avg[0] - avg[1])),
    }[name]().mean()


@pytest.mark.parametrize("name", ["sigmoid", "simpo", "bco_pair", "kto_pair", "aot", "aot_unpaired"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_gradients_do_not_depend_on_micro_batches(name, cut):
    """Seven pairs; a linear map stands for the model. Whatever the cut, value and gradient are those of the whole batch's definition."""
    generator = torch.Generator().manual_seed(4)
    theta = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    lengths = torch.randint(1, 9, (14,), generator=generator).tolist()
    features = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]
    refs = [-2 * torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]
    policy = [-(x @ theta).square() for x in features]
    logp, ref = torch.stack([p.sum() for p in policy]), torch.stack([q.sum() for q in refs])
    ratio, avg = logp - ref, logp / torch.tensor(lengths)
    expected = whole_batch(name, ratio[0::2], ratio[1::2], logp[0::2] - logp[1::2], ref[0::2] - ref[1::2], None, (avg[0::2], avg[1::2]), 0.3)
    (grad,) = torch.autograd.grad(expected, theta)

    loss = DpoLoss(losses=(name,), beta=0.3, pairs=7)
    as32 = lambda parts, i: [part.detach().numpy().astype(np.float32) for part in parts[2 * i : 2 * i + 2]]  # noqa: E731
    rows = [TrainRow(np.zeros(1, np.int32), [np.zeros(n, np.int32) for n in lengths[2 * i : 2 * i + 2]], {"ref_logprobs": as32(refs, i)}) for i in range(7)]
    if loss.needs_gather:
        rows = loss.gathered(rows, [as32(policy, i) for i in range(7)])
    total, value = torch.zeros_like(theta), 0.0
    for start in range(0, 7, cut):
        part = rows[start : start + cut]
        empty = tokens_of(part, [row.fields["ref_logprobs"] for row in part])
        logprobs = torch.cat([-(x @ theta).square() for x in features[2 * start : 2 * (start + len(part))]])
        out = loss(replace(empty, logprobs_N=logprobs, fields={k: f.double() for k, f in empty.fields.items()}))
        total += torch.autograd.grad(out.loss, theta)[0]
        value += out.loss.item()
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(total, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("divergence", ["js", "alpha", "forward_kl"])
def test_extreme_ratios_stay_finite(divergence):
    ratios = torch.tensor([-3000.0, 3000.0], requires_grad=True)
    scores = divergence_scores(ratios, divergence, 0.5)
    scores.sum().backward()
    assert torch.isfinite(scores).all()
    assert torch.isfinite(ratios.grad).all()


def test_orpo_odds_hold_at_both_ends():
    tokens = make([[-1e-9], [-80.0]])
    out = DpoLoss(losses=("orpo",))(tokens)
    out.loss.backward()
    assert torch.isfinite(tokens.logprobs_N.grad).all()
    assert out.loss.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"losses": ("dpo",)}, "dpo.losses: dpo"),
        ({"losses": ()}, "none given"),
        ({"losses": ("sigmoid", "hinge")}, "dpo.weights has 1 numbers for 2"),
        ({"losses": ("sigmoid", "sigmoid"), "weights": (1.0, 1.0)}, "names a loss twice"),
        ({"losses": ("sigmoid", "hinge"), "weights": (1.0, -1.0)}, "dpo.weights=.*at least 0"),
        ({"weights": (0.0,)}, "dpo.weights=.*one of them above 0"),
        ({"weights": (math.nan,)}, "dpo.weights"),
        ({"beta": 0.0}, "dpo.beta"),
        ({"beta": -0.1}, "dpo.beta"),
        ({"beta": math.nan}, "dpo.beta"),
        ({"beta": math.inf}, "dpo.beta"),
        ({"divergence": "kl"}, "dpo.divergence"),
        ({"losses": ("robust",), "label_smoothing": 0.5}, "label_smoothing"),
        ({"losses": ("exo_pair",)}, "exo_pair"),
        ({"losses": ("hinge",), "label_smoothing": 0.1}, "no meaning for dpo.losses hinge"),
        ({"losses": ("ipo",), "margin": 0.1}, "no meaning for dpo.losses ipo"),
        ({"losses": ("simpo",), "divergence": "js"}, "no meaning for dpo.losses simpo"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(UserError, match=words):
        DpoLoss(**settings)


def test_needs_and_pickling():
    assert DpoLoss().needs_reference
    assert not DpoLoss(losses=("simpo",)).needs_reference
    assert DpoLoss(losses=("sigmoid", "aot"), weights=(1.0, 1.0)).needs_gather
    assert pickle.loads(pickle.dumps(DpoLoss(beta=0.2))) == DpoLoss(beta=0.2)
    with pytest.raises(KeyError, match="ref_logprobs"):
        DpoLoss()(make([[-1.0], [-1.0]]))


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "nca_pair"])
def test_while_the_policy_is_the_reference_a_given_one_is_only_measured(name):
    """Values and gradients are those of an exact reference, however the given one was rounded; the gap is its mean distance over covered tokens."""
    answers, mask = [[-2.0, -1.0], [-2.5]], [[1.0, 1.0], [1.0]]
    loss = DpoLoss(losses=(name,), beta=BETA)
    exact, rounded = make(answers, answers, mask), make(answers, [[-2.25, -1.0], [-2.125]], mask)
    want, got = loss(exact), replace(loss, reference_is_current=True)(rounded)
    want.loss.backward()
    got.loss.backward()
    assert got.loss.item() == want.loss.item()
    assert torch.equal(rounded.logprobs_N.grad, exact.logprobs_N.grad)
    measured = summarise({name: value.item() for name, value in got.sums.items()})
    assert (measured["margin"], measured["kl"], measured["accuracy"]) == (0.0, 0.0, 0.5)
    assert measured["reference_gap"] == pytest.approx((0.25 + 0.0 + 0.375) / 3)
    assert "reference_gap" not in want.sums


def test_the_gap_leaves_out_what_the_loss_does_not_cover():
    tokens = make([[-2.0, -1.0], [-2.5]], [[-2.25, -9.0], [-2.125]], [[1.0, 0.0], [1.0]])
    sums = DpoLoss(reference_is_current=True)(tokens).sums
    assert sums["reference_gap"].item() == pytest.approx(0.625)


def test_what_is_gathered_before_the_first_update_is_against_the_policy_itself():
    """The KL estimates of kto_pair are 0 then: each loss is [1 - sigmoid(0) + 1 - sigmoid(0)] / 2."""
    row = TrainRow(np.zeros(2, np.int32), [np.zeros(1, np.int32)] * 2, {"ref_logprobs": [np.float32([-3.0]), np.float32([-4.0])]})
    logprobs = [[np.float32([-2.0]), np.float32([-2.5])]]
    loss = DpoLoss(losses=("kto_pair",), reference_is_current=True)
    (gathered,) = loss.gathered([row], logprobs)
    assert [values.tolist() for values in gathered.fields["kto_pair_batch"]] == [[0.0], [0.0]]
    assert loss(tokens_of([gathered], logprobs)).loss.item() == 0.5
