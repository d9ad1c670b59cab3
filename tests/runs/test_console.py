"""The line of a step, of an evaluation, and what a terminal sees."""

from __future__ import annotations

import io
import logging

import pytest

from rlcli.runs.console import COLUMNS, HEADER_EVERY, Console, brief

STEP = {
    "sampled/reward": -0.125,
    "sampled/accuracy": 0.4375,
    "sampling/trained": 16.0,
    "sampling/dropped_all_right": 2.0,
    "sampling/dropped_all_wrong": 5.0,
    "sampling/dropped_stale": 1.0,
    "sampled/response_tokens": 6.94,
    "update/entropy": 0.5234,
    "update/clip_low": 0.001,
    "update/clip_high": 0.0234,
    "update/gap": 0.0211,
    "update/grad_norm": 1.25,
    "rate/trained_tokens_per_s": 1234.0,
    "seconds/step": 9.06,
}


def test_the_line_of_a_step_stands_below_its_heads() -> None:
    out = io.StringIO()
    Console("dapo", 20, out).step(1, STEP)
    head, line = out.getvalue().splitlines()
    assert head.split() == ["step", "reward", "right", "kept/drop", "length", "entropy", "clip", "%", "gap", "|grad|", "tok/s", "s"]
    assert line.split() == ["1/20", "-0.125", "43.8%", "16/8", "6.9", "0.523", "0.1/2.3", "0.021", "1.250", "1.2k", "9.1"]
    assert len(head) == len(line)


@pytest.mark.parametrize("kind", list(COLUMNS))
def test_a_step_without_any_metric_leaves_its_cells_empty(kind: str) -> None:
    out = io.StringIO()
    Console(kind, 0, out).step(3, {})
    head, line = out.getvalue().splitlines()
    assert line.split() == ["3"]
    assert len(head) == len(line)


def test_the_heads_come_again() -> None:
    out = io.StringIO()
    console = Console("dapo", 100, out)
    for step in range(1, HEADER_EVERY + 2):
        console.step(step, STEP)
    assert [number for number, line in enumerate(out.getvalue().splitlines()) if "reward" in line] == [0, HEADER_EVERY + 1]


def test_an_evaluation_says_its_main_measures_once() -> None:
    out = io.StringIO()
    Console("dapo", 20, out).evaluation(20, {"accuracy": 0.743, "avg@4": 0.743, "pass@1": 0.743, "pass@4": 0.9, "maj@4": 0.8, "prompts": 64.0}, "after")
    assert out.getvalue() == "evaluation after: 74.3% right, 90.0% pass@4, 80.0% maj@4\n"


def test_lines_and_warnings_go_to_the_log_too() -> None:
    log = logging.Logger("test")
    stream = io.StringIO()
    log.addHandler(logging.StreamHandler(stream))
    log.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    console = Console("dpo", 2, io.StringIO(), log)
    console.info("hello")
    console.warn("careful")
    assert stream.getvalue() == "INFO hello\nWARNING warning: careful\n"


def test_a_terminal_gets_a_bar_and_the_same_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    console = Console("dapo", 4, out)
    console.doing("rollout")
    console.step(1, STEP)
    console.warn("[bold]not markup[/bold]")
    console.close()
    console.close()
    text = out.getvalue()
    assert "1/4" in text
    assert "16/8" in text
    assert "[bold]not markup[/bold]" in text


def test_nothing_but_plain_text_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    console = Console("dapo", 4, out)
    console.doing("rollout")
    console.step(1, STEP)
    console.close()
    assert "\x1b" not in out.getvalue()
    assert "rollout" not in out.getvalue()


@pytest.mark.parametrize(("value", "text"), [(0.4, "0"), (873.4, "873"), (1234.0, "1.2k"), (45_678.0, "46k"), (float("nan"), "nan")])
def test_brief_rates(value: float, text: str) -> None:
    assert brief(value) == text
