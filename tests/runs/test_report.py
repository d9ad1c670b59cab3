"""The report: complete, self-contained, and proof against what a model wrote; and `msrl samples`."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.load import load
from rlcli.errors import UserError
from rlcli.runs import plots
from rlcli.runs.charts import draw
from rlcli.runs.folder import RunFolder
from rlcli.runs.metrics import stages
from rlcli.runs.reading import find_samples, show
from rlcli.runs.report import render, write_report
from rlcli.types import Group, Prompt, Sample, Verdict

HOSTILE = "</pre></details><script>alert(1)</script><img src=https://example.com/x onerror=alert(2)>\x1b[31m\u202e"
VOID = {"meta", "input", "br", "img", "link"}


class Balance(HTMLParser):
    """Every element, and whether all are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps with a held-out evaluation before and after; every response is hostile."""
    config = load("dapo", "demo", [f"run.dir={tmp_path}", "run.name=r<b>", "train.steps=3", "data.template=<i>x</i>"]).config
    with RunFolder.create(config, "dapo", "demo", {"command": ["msrl", "<u>"]}, io.StringIO()) as folder:
        folder.decode = lambda ids: HOSTILE
        folder.log_eval(0, {"accuracy": 0.25}, "before")
        for step in (1, 2, 3):
            folder.log_step(
                step,
                {
                    "sampled/reward": step / 10,
                    "sampling/trained": 4.0,
                    "sampling/dropped_all_wrong": 2.0,
                    "sampling/acceptance": math.nan,
                    "seconds/step": 5.0,
                    "seconds/rollout": 2.0,
                    "memory/all_gib": 1.0, "batch/<s>": 2.0,
                },
            )
            samples = [Sample(np.array([1, 2], np.int32), np.array([-1.0, -2.0], np.float32), "stop", 1) for _ in range(2)]
            verdicts = [Verdict(1.0, True, HOSTILE, "correct"), Verdict(-1.0, False, None, "no_answer")]
            folder.log_samples(step, [Group(Prompt(7, np.array([3], np.int32), "<answer>"), samples, verdicts)])
        folder.log_eval(3, {"accuracy": 0.75}, "after")
    return folder.path


def test_the_report_holds_curves_settings_and_samples(run: Path) -> None:
    text = (run / "report.html").read_text()
    for wanted in ("25% → 75%", "3 of 3", "Reward", "Groups", "Seconds a step", "train.steps", "newest first", "sampled/reward", "no answer"):
        assert wanted in text, wanted
    page = Balance(text)
    assert page.open == []
    assert page.seen.count("svg") == 6  # reward, accuracy, held-out, groups, memory, seconds


def test_nothing_from_the_run_becomes_markup_and_nothing_is_loaded(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Balance(text)
    assert not {"script", "img", "iframe", "link", "object", "u", "s"} & set(page.seen)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text)


def test_a_run_without_any_step_and_without_a_readable_configuration_still_has_a_report(tmp_path: Path) -> None:
    config = load("dapo", "demo", [f"run.dir={tmp_path}"]).config
    RunFolder.create(config, "dapo", "demo", out=io.StringIO()).finish("failed", "rank 0 died <at once>")
    (folder,) = tmp_path.iterdir()
    (folder / "config.yaml").write_text("{")
    text = render(folder)
    assert Balance(text).open == []
    for wanted in ("No step has finished yet", "rank 0 died &lt;at once&gt;", "cannot be read"):
        assert wanted in text, wanted


def test_a_report_can_be_written_while_the_run_goes_on(run: Path, tmp_path: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "sampled/rew')
    out = write_report(run, tmp_path / "else.html")
    assert out.read_text() == render(run)
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        write_report(run, tmp_path / "nowhere" / "x.html")


def test_ticks_are_round_and_cover_the_data() -> None:
    assert plots.ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert plots.ticks(-0.18, 0.61) == [-0.2, 0.0, 0.2, 0.4, 0.6, 0.8]
    assert plots.ticks(3e-5, 9e-5) == [2e-05, 4e-05, 6e-05, 8e-05, 1e-04]
    assert plots.ticks(5.0, 5.0)[0] < 5.0 < plots.ticks(5.0, 5.0)[-1]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.4, "1,234"), (12.345, "12.3"), (0.5, "0.5"), (0.01234, "0.0123"), (2e-5, "2e-5"), (-1.25e7, "-1.2e7"), (100.0, "100")]
)
def test_numbers_of_axes(value: float, text: str) -> None:
    assert plots.plain(value) == text


def test_a_line_goes_through_its_points() -> None:
    svg = plots.lines([plots.Series("a", [(0.0, 0.0), (10.0, 1.0)])])
    (path,) = re.findall(r'<polyline class="l1" points="([^"]+)"', svg)
    left, right = plots.LEFT, plots.WIDTH - plots.RIGHT
    assert path == f"{left:.1f},{plots.HEIGHT - plots.BOTTOM:.1f} {right:.1f},{plots.TOP:.1f}"


def test_many_points_are_averaged_and_smoothing_has_no_bias() -> None:
    thinned = plots.thin([(float(x), float(x % 2)) for x in range(1000)], most=100)
    assert thinned == [(float(x), 0.5) for x in range(9, 1000, 10)]
    assert plots.smooth([(0.0, 3.0), (1.0, 3.0), (2.0, 3.0)], 5) == [(0.0, 3.0), (1.0, pytest.approx(3.0)), (2.0, pytest.approx(3.0))]


def test_bars_stack_to_the_sum_of_their_values() -> None:
    svg = plots.bars(["a", "b"], [(1.0, [1.0, 3.0]), (2.0, [2.0, 2.0])])
    heights = {kind: [float(height) for height in re.findall(rf'class="{kind}"[^>]*height="([\d.]+)"', svg)] for kind in ("b1", "b2")}
    full = plots.HEIGHT - plots.TOP - plots.BOTTOM
    assert [a + b for a, b in zip(heights["b1"], heights["b2"], strict=True)] == pytest.approx([full, full], abs=0.2)
    assert heights["b2"][0] == pytest.approx(3 * heights["b1"][0], abs=0.3)


def test_a_line_that_repeats_another_is_drawn_once() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "eval/accuracy": 0.5, "eval/pass@1": 0.5, "eval/pass@4": 0.9} for step in (0, 5)]
    (chart,) = [chart for chart in draw("dapo", rows) if chart.title == "Held-out accuracy"]
    assert chart.legend == [("accuracy", "50%"), ("pass@4", "90%")]


def test_stages_add_up_to_the_step() -> None:
    assert stages({"seconds/step": 10.0, "seconds/rollout": 4.0, "seconds/update": 5.0, "x": 1.0}) == {"rollout": 4.0, "update": 5.0, "other": 1.0}


def test_samples_by_step_and_verdict(run: Path) -> None:
    assert [(row["step"], row["correct"]) for row in find_samples(run, "train", None, False, 2)] == [(2, False), (3, False)]
    assert [(row["step"], row["correct"]) for row in find_samples(run, "train", 2, None, 5)] == [(2, True), (2, False)]
    with pytest.raises(UserError, match="no right samples of step 9; it has those of 3 steps from 1 to 3"):
        find_samples(run, "train", 9, True, 5)
    with pytest.raises(UserError, match="has no samples"):
        find_samples(run, "eval", None, None, 5)


def test_no_control_sequence_reaches_the_terminal(run: Path) -> None:
    (row,) = find_samples(run, "train", 3, True, 1)
    text = show(row)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "\\x1b[31m\\u202e" in text
    assert json.loads(show(row, raw=True)) == row
    assert show(row, raw=True).isascii()
