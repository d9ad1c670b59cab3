"""report.html of a run: curves, settings, environment and samples in one file that needs neither network nor script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlcli.config.load import differences, from_dict
from rlcli.config.settings import table as settings_table
from rlcli.errors import UserError
from rlcli.runs import charts, jsonl, page
from rlcli.runs.folder import read_state
from rlcli.runs.metrics import meaning
from rlcli.runs.plots import percent, plain

Row = dict[str, Any]
MOST_SAMPLES = 240
TAIL = 5  # steps that "at the end" means


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder, by default as report.html inside it; returns the file. Raises UserError where the folder is no run's."""
    text = render(run)
    out = out or run / "report.html"
    draft = out.with_name(f".{out.name}.part")
    try:
        draft.write_text(text, encoding="utf-8", errors="replace")
        draft.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    return out


def render(run: Path) -> str:
    """The whole page."""
    state = read_state(run)
    rows = list(jsonl.read(run / "metrics.jsonl"))
    config = _config(run)
    drawn = charts.draw(state["kind"], rows)
    body = _top(run, state, config)
    body += f'<div class="cards">{"".join(page.card(label, value) for label, value in summary(state, rows))}</div>'
    pictures = "".join(page.chart(one.title, one.about, one.svg, one.legend) for one in drawn)
    body += page.section("Curves", f'<div class="charts">{pictures}</div>' if pictures else "<p>No step has finished yet.</p>")
    body += page.section("Settings that differ from the defaults", _settings(state["kind"], config))
    body += page.section("Samples", _samples(run))
    body += page.section("Everything else", _everything(rows) + _environment(run))
    body += "<footer>Made by msrl. Point at a curve to read its values; the numbers behind it are in metrics.jsonl.</footer>"
    return page.page(f"{run.resolve().name} · msrl", body)


def summary(state: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(label, value) of the figures at the top."""
    steps = [row for row in rows if "seconds/step" in row or "update/loss" in row]
    out = [("steps", f"{state.get('step', 0)} of {state['total']}" if state.get("total") else str(state.get("step", 0)))]
    for name, label, form in (("eval/accuracy", "held-out accuracy", percent), ("eval/margin", "held-out margin", plain)):
        found = [value for _, value in charts.points(rows, name)]
        if found:
            out.append((label, form(found[0]) if len(found) == 1 else f"{form(found[0])} → {form(found[-1])}"))
    for name, label, form in (
        ("sampled/accuracy", "accuracy in training", percent),
        ("sampled/reward", "mean reward", plain),
        ("update/margin", "margin", plain),
        ("sampled/response_tokens", "response tokens", plain),
        ("rate/samples_per_s", "samples/s", plain),
        ("rate/pairs_per_s", "pairs/s", plain),
        ("rate/trained_tokens_per_s", "tokens trained on/s", plain),
    ):
        found = [value for _, value in charts.points(steps, name)]
        if found:
            out.append((label if len(found) <= TAIL else f"{label}, last {TAIL} steps", form(sum(found[-TAIL:]) / len(found[-TAIL:]))))
    memory = [value for row in rows for name, value in row.items() if name.startswith("memory/") and isinstance(value, (int, float))]
    if memory:
        out.append(("memory, highest", f"{max(memory):.1f} GiB"))
    duration = _duration(state.get("resumed", state.get("started")), state.get("ended"))
    return [*out, ("from start to end", duration)] if duration else out


def _top(run: Path, state: Mapping[str, Any], config: Any) -> str:
    name = page.escape(run.resolve().name)
    status = page.escape(str(state.get("state", "")))
    facts = [f"msrl train {state['kind']}", f"recipe {state['recipe']}" if state.get("recipe") else "", f"model {config.model}" if config else "", _clock(state.get("started"))]
    message = f'<p class="sub {status}">{page.escape(str(state["message"]))}</p>' if state.get("message") else ""
    return f'<div class="top"><h1>{name}</h1><span class="pill {status}">{status}</span></div><p class="sub">{page.escape(" · ".join(fact for fact in facts if fact))}</p>{message}'


def _config(run: Path) -> Any:
    """The resolved configuration, or None where it is missing or of another version: a report of the rest is better than none."""
    try:
        data = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        return from_dict(read_state(run)["kind"], data).config
    except (OSError, yaml.YAMLError, UserError):
        return None


def _settings(kind: str, config: Any) -> str:
    if config is None:
        return "<p>config.yaml cannot be read by this version.</p>"
    known = settings_table(kind)
    rows = [[key, "(none)" if default == "???" else _value(default), _value(value), known[key].help] for key, (default, value) in differences(kind, config).items()]
    return page.table(["setting", "default", "here", "meaning"], rows, code=(0, 1, 2), soft=(3,))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _samples(run: Path) -> str:
    """Samples in the order of their steps; of a long run the first few steps' and the last ones'."""
    out = ""
    for kind, title in (("train", "training"), ("eval", "held-out")):
        rows = list(jsonl.read(run / "samples" / f"{kind}.jsonl"))
        if len(rows) > MOST_SAMPLES:
            rows = rows[: MOST_SAMPLES // 3] + rows[-(MOST_SAMPLES - MOST_SAMPLES // 3) :]
        if rows:
            lines = "".join(map(page.sample, reversed(rows)))
            head = '<div class="head"><span>step</span><span>verdict</span><span>response</span><span class="r">length</span></div>'
            out += f'<details class="box" style="margin-bottom:12px"{" open" if kind == "train" else ""}><summary>{title}: {len(rows)} samples, newest first</summary>{head}{lines}</details>'
    if not out:
        return ""
    choices = (("all", "all", " checked"), ("only-right", "right ones", ""), ("only-wrong", "wrong ones", ""))
    radios = "".join(f'<label><input type="radio" name="which" id="{name}"{checked}> {text}</label>' for name, text, checked in choices)
    return f'<div class="samples"><div class="box filter" style="margin-bottom:12px">Show {radios}</div>{out}</div>'


def _everything(rows: Sequence[Row]) -> str:
    """Each metric with its meaning and its first, last, least and greatest value."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if "/" in name and isinstance(value, (int, float)))
    lines = []
    for name in sorted(names):
        values = [value for _, value in charts.points(rows, name)]
        lines.append([name, *map(plain, (values[0], values[-1], min(values), max(values))), meaning(name)])
    if not lines:
        return ""
    return page.folded(f"All {len(lines)} metrics", page.table(["metric", "first", "last", "least", "greatest", "meaning"], lines, numbers=(1, 2, 3, 4), code=(0,), soft=(5,)))


def _environment(run: Path) -> str:
    """Machine and versions of the latest start."""
    try:
        starts = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        latest = dict(starts[-1])
    except (OSError, ValueError, IndexError, TypeError):
        return ""
    rows = [[key, value if isinstance(value, str) else " ".join(value) if key == "command" else json.dumps(value, ensure_ascii=False)] for key, value in latest.items()]
    title = "Environment" if len(starts) == 1 else f"Environment of the last of {len(starts)} starts"
    return f'<div style="height:12px"></div>{page.folded(title, page.table(["", ""], rows, code=(1,)))}'


def _clock(text: Any) -> str:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").strftime("%d %B %Y, %H:%M")
    except ValueError:
        return ""


def _duration(start: Any, end: Any) -> str:
    """Time between two of the run's marks, as 2 h 05 min or 3 min 20 s; "" where one is missing."""
    try:
        first, last = (datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z") for text in (start, end))
    except ValueError:
        return ""
    seconds = int((last - first).total_seconds())
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min" if seconds >= 3600 else f"{seconds // 60} min {seconds % 60:02d} s"
