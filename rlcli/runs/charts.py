"""Which charts a report has: titles, what each shows, and the metrics behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlcli.runs import plots
from rlcli.runs.metrics import stages
from rlcli.runs.plots import Format, Points, Series, percent, plain

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines by their names in the legend -> metric. A metric that ends with * stands for all that begin so."""

    title: str
    about: str
    lines: dict[str, str]
    form: Format = plain
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart ready for the page: its SVG and its legend, names in the order of their colours, each with its last value."""

    title: str
    about: str
    svg: str
    legend: list[tuple[str, str]] = field(default_factory=list)


HELD_OUT = Chart(
    "Held-out accuracy", "before, during and after training",
    {"accuracy": "eval/accuracy", "pass@": "eval/pass@*", "maj@": "eval/maj@*"}, percent,
)  # fmt: skip
COMMON = (
    Chart("Gradient norm", "of the whole gradient, before clipping", {"norm": "update/grad_norm"}, zero=True),
    Chart("Learning rate", "", {"rate": "update/lr"}, zero=True),
    Chart(
        "Tokens a second", "sampled in rollouts, computed in updates, trained on in all",
        {"rollout": "rate/rollout_tokens_per_s", "update": "rate/update_tokens_per_s", "trained on": "rate/trained_tokens_per_s"}, zero=True,
    ),
    Chart("Memory", "of all processes of the run, in GiB", {"memory": "memory/all_gib"}, zero=True),
)  # fmt: skip
DAPO = (
    Chart("Reward", "mean score before shaping", {"all samples": "sampled/reward", "trained on": "batch/reward"}),
    Chart("Accuracy", "share of samples that are right", {"all samples": "sampled/accuracy", "held-out": "eval/accuracy"}, percent),
    HELD_OUT,
    Chart("Entropy", "of the policy, in nats a token", {"entropy": "update/entropy"}, zero=True),
    Chart("Response length", "tokens", {"mean": "sampled/response_tokens", "longest trained on": "batch/response_tokens_max"}, zero=True),
    Chart("Truncated", "samples cut at the limit", {"all samples": "sampled/truncated"}, percent, zero=True),
    Chart("Clipped tokens", "where the clip of the ratio binds", {"low": "update/clip_low", "high": "update/clip_high"}, percent, zero=True),
    Chart("Trainer and rollout engine", "mean |log-prob difference|, in nats", {"update": "update/gap", "probe": "sync/probe_gap"}, zero=True),
    Chart("KL", "of the old policy to the new, in nats a token", {"KL": "update/kl"}, zero=True),
    *COMMON,
)
DPO = (
    Chart("Loss", "", {"training": "update/loss", "held-out": "eval/loss"}),
    Chart("Ranked rightly", "pairs whose chosen answer has the higher implicit reward", {"training": "update/accuracy", "held-out": "eval/accuracy"}, percent),
    Chart("Margin", "of the implicit rewards", {"training": "update/margin", "held-out": "eval/margin"}),
    Chart("Implicit rewards", "", {"chosen": "update/reward_chosen", "rejected": "update/reward_rejected"}),
    Chart("Log-probs", "nats a token", {"chosen": "update/token_logp_chosen", "rejected": "update/token_logp_rejected"}),
    Chart("KL", "to the reference, in nats a token", {"KL": "update/kl"}, zero=True),
    *COMMON,
)
LINES = {"dapo": DAPO, "dpo": DPO}
GROUPS = {
    "trained on": ("sampling/trained",),
    "kept for later": ("sampling/carried_out",),
    "all right": ("sampling/dropped_all_right",),
    "all wrong": ("sampling/dropped_all_wrong",),
    "other": ("sampling/dropped_unjudged", "sampling/dropped_incomplete", "sampling/dropped_stale"),
}


def points(rows: Sequence[Row], name: str) -> Points:
    """(step, value) of every row that has a finite number under that name."""
    return [(number(row["step"]), number(row[name])) for row in rows if isinstance(row.get(name), (int, float))]


def number(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def draw(kind: str, rows: Sequence[Row]) -> list[Drawn]:
    """All charts that have something to show."""
    drawn = [_lines(chart, rows) for chart in LINES[kind]]
    if kind == "dapo":
        drawn.insert(3, _groups(rows))
    drawn.append(_stages(rows))
    return [chart for chart in drawn if chart.svg]


def _lines(chart: Chart, rows: Sequence[Row]) -> Drawn:
    series = []
    for name, metric in chart.lines.items():
        for full in _matching(rows, metric):
            title = name if metric == full else full.partition("/")[2]
            series.append(Series(title, points(rows, full), markers=full.startswith("eval/")))
    series = [one for one in series if one.points and title_is_new(one, series)]
    svg = plots.lines(series, chart.form, chart.zero, chart.title)
    return Drawn(chart.title, chart.about, svg, [(one.name, chart.form(one.points[-1][1])) for one in series])


def title_is_new(one: Series, series: Sequence[Series]) -> bool:
    """False for a line that repeats an earlier one point by point (pass@1 is the accuracy)."""
    return next(other for other in series if other.points == one.points and other.markers == one.markers) is one


def _matching(rows: Sequence[Row], metric: str) -> list[str]:
    """The metric itself, or all that begin like it."""
    if not metric.endswith("*"):
        return [metric]
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(metric[:-1])))


def _groups(rows: Sequence[Row]) -> Drawn:
    """Groups of each step by what became of them."""
    steps = [row for row in rows if "sampling/trained" in row]
    data = [(number(row["step"]), [sum(number(row.get(name, 0)) for name in names) for names in GROUPS.values()]) for row in steps]
    used = [place for place in range(len(GROUPS)) if any(values[place] for _, values in data)]
    names = [name for place, name in enumerate(GROUPS) if place in used]
    kept = [(x, [values[place] for place in used]) for x, values in data]
    svg = plots.bars(names, kept, plain, "Groups") if used else ""
    return Drawn("Groups", "what became of the groups sampled or kept", svg, [(name, plain(value)) for name, value in zip(names, kept[-1][1], strict=True)] if svg else [])


def _stages(rows: Sequence[Row]) -> Drawn:
    """Seconds of each step by stage."""
    steps = [(number(row["step"]), stages({k: number(v) for k, v in row.items() if k.startswith("seconds/") and isinstance(v, (int, float))})) for row in rows if "seconds/step" in row]
    names = sorted({name for _, parts in steps for name in parts}, key=lambda name: -sum(parts.get(name, 0.0) for _, parts in steps))
    data = [(x, [parts.get(name, 0.0) for name in names]) for x, parts in steps]
    means = [sum(values[i] for _, values in data) / len(data) for i in range(len(names))]
    return Drawn("Seconds a step", "by stage; legend: means", plots.bars(names, data, plain, "Seconds a step") if names else "", list(zip(names, map(plain, means), strict=True)))
