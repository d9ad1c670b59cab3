"""`msrl reward check` and `msrl reward list`: what they show, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rlcli import app
from rlcli.errors import UserError
from rlcli.rewards.verifiers import BUILT_IN


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app.application(), ["reward", *args], env={"COLUMNS": "200"}, input=stdin)


def fields(output: str) -> dict[str, str]:
    return {line[:10].strip(): line[11:] for line in output.splitlines() if line.strip()}


def test_check_shows_what_was_compared_and_decided() -> None:
    result = run("check", "--verifier", "math", "--answer", r"\frac12", "--text", r"So $\boxed{\dfrac{2}{4}}$.")
    assert result.exit_code == 0
    shown = fields(result.output)
    assert shown["extracted"] == r"\dfrac{2}{4}"
    assert shown["compared"] == r"\frac{2}{4}  [1/2]"
    assert shown["with"] == r"\frac{1}{2}  [1/2]"
    assert (shown["score"], shown["correct"], shown["reason"]) == ("1", "true", "correct")
    assert shown["time"].endswith(" ms")


def test_check_shows_each_of_several_verifiers_and_their_sum() -> None:
    text = "<think>a</think><answer>6</answer> Answer: 6"
    result = run("check", "-v", "format", "-v", "dapo", "-w", "0.5", "-w", "2", "-o", "dapo.window=200", "-a", "5", "-t", text)
    lines = [line.split(None, 1) for line in result.output.splitlines() if line]
    assert [value for name, value in lines if name == "verdict"] == ["correct, correct=true, score 1", "wrong, correct=false, score -1"]
    assert fields(result.output)["score"] == "-1.5"
    assert fields(result.output)["correct"] == "false"


def test_check_of_nothing_to_extract() -> None:
    shown = fields(run("check", "-v", "boxed", "-a", "5", "-t", "-", stdin="no box").output)
    assert shown["extracted"] == "nothing"
    assert shown["reason"] == "no_answer"


def test_check_says_that_time_ran_out() -> None:
    result = run("check", "-v", "regex", "-o", "regex.pattern=(a+)+$", "--timeout", "0.5", "-a", "x", "-t", "a" * 60 + "b")
    shown = fields(result.output)
    assert result.exit_code == 0
    assert shown["lost"] == "no verdict within 0.5 s; the process was ended"
    assert (shown["score"], shown["reason"]) == ("0", "timeout")


def test_check_prints_nothing_that_a_terminal_would_act_on() -> None:
    result = run("check", "-v", "boxed", "-a", "5", "-t", "\x1b[2J\\boxed{\x1b]0;x\x07\ud800}")
    assert fields(result.output)["extracted"] == r"\x1b]0;x\x07\ud800"


def test_check_of_a_file(tmp_path: Path) -> None:
    rows = [{"text": "Answer: 5", "answer": "5"}, {"response": "Answer: 6", "truth": 5}, {"text": "none", "answer": "5"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = run("check", "-v", "dapo", "-f", str(file))
    assert [line.split() for line in result.output.splitlines()[1:4]] == [
        ["1", "1.00", "correct", "5", "5"],
        ["2", "-1.00", "wrong", "6", "5"],
        ["3", "-1.00", "no_answer", "-", "5"],
    ]
    assert result.output.splitlines()[-1] == "1 of 3 correct (1 correct, 1 wrong, 1 no_answer)"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-v", "maths", "-a", "5", "-t", "5"], "did you mean math?"),
        (["-v", "dapo", "-a", "5"], "give --answer and --text"),
        (["-v", "dapo", "-f", "x", "-a", "5"], "either --file"),
        (["-v", "dapo", "-f", "missing.jsonl"], "cannot be read"),
        (["-v", "dapo", "-w", "1", "-w", "2", "-a", "5", "-t", "5"], "2 values for 1 verifiers"),
        (["-v", "dapo", "--timeout", "0", "-a", "5", "-t", "5"], "--timeout must be above 0"),
    ],
)
def test_check_refuses_wrong_input(args: list[str], said: str) -> None:
    error = run("check", *args).exception
    assert isinstance(error, UserError)
    assert said in str(error)


@pytest.mark.parametrize(("content", "said"), [("", "holds no rows"), ("{", "line 1: not JSON"), ('{"text": "a"}', "line 1: needs a text in 'answer'"), ("[1]", "line 1")])
def test_check_names_the_bad_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content, encoding="utf-8")
    error = run("check", "-v", "dapo", "-f", str(file)).exception
    assert isinstance(error, UserError)
    assert said in str(error)


def test_list_names_every_verifier_with_its_options() -> None:
    output = run("list").output
    assert set(BUILT_IN) <= set(output.split())
    assert "option length.most=4000" in output
    assert "option format.strict=false" in output
