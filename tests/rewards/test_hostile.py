"""Texts made to break a verifier. Each ends in a verdict, in the process that would have been killed had it not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.config.schema import RewardConfig
from rlcli.rewards.pool import Item, RewardPool

VERIFIERS = ["dapo", "boxed", "math", "exact", "format", "length", "acc", "base_acc", "strict_format", "step", "retool_reward"]
MEBI = 1 << 20


def box(content: str) -> str:
    return f"\\boxed{{{content}}}"


TEXTS = {
    "tower": box("10^{10^{10}}"),
    "other tower": box("9^{9^{9}} + x"),
    "factorial": box("99999999999!"),
    "binomial": box("\\binom{10^9}{5 \\cdot 10^8}"),
    "huge number": box("9" * 100_000),
    "huge exponent": box("1e999999999"),
    "division by zero": box("\\frac{0}{0}"),
    "deep brackets": box("(" * 50_000 + "1" + ")" * 50_000),
    "deep fractions": box("\\frac{1}{" * 3_000 + "1" + "}" * 3_000),
    "deep roots": box("sqrt(" * 150 + "2" + ")" * 150),
    "deep texts": box("\\text{" * 150 + "a" + "}" * 150),
    "braces": "{" * (MEBI // 2) + "}" * (MEBI // 2),
    "boxed braces": "\\boxed" + "{" * (MEBI // 2) + "}" * (MEBI // 2),
    "open braces": "{" * MEBI,
    "open boxes": "\\boxed{" * 100_000,
    "nested boxes": "\\boxed{" * 25_000 + "}" * 25_000,
    "many boxes": box("1") * 20_000,
    "NULs": box("\x00\x005\x00"),
    "lone surrogates": box("\ud800\udfff5"),
    "import": box("__import__('os').system('touch EVALUATED')"),
    "import as an answer": "Answer: __import__('os').system('touch EVALUATED')",
    "import in tags": "<think>x</think><answer>open('EVALUATED', 'w')</answer>",
    "lambda": box("(lambda: open('EVALUATED', 'w'))()"),
    "dollars": "$" * MEBI,
    "answers": "Answer: " * 100_000,
    "answer and spaces": "answer" + " " * MEBI,
    "tags": "<answer>" * 100_000 + "<think>" * 100_000,
    "lines": "\n" * MEBI,
    "backslashes": "\\" * MEBI,
    "open displays": "\\[ " * 3_000,
    "long list": box("1," * 500),
    "many ands": box("a and " * 160),
    "many signs": box("\\pm 1," * 100),
    "long chain": box("a=" * 300),
    "right to left": box("\u202e5\u202c"),
    "controls": "\x1b[2J" + box("5\x07"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with RewardPool(RewardConfig(verifiers=VERIFIERS, weights=[1.0] * len(VERIFIERS), workers=1, timeout_s=60.0)) as pool:
            yield pool
    assert not Path(folder, "EVALUATED").exists(), "something of a text was evaluated"


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text_ends_in_a_verdict(pool: RewardPool, name: str) -> None:
    verdicts = pool.judge([Item(TEXTS[name], truth) for truth in ("7", "x+1", "(1,2)")])
    assert {verdict.reason for verdict in verdicts} <= {"wrong", "no_answer", "unparsed"}
    assert not any(verdict.correct for verdict in verdicts)


def test_a_hostile_truth_ends_in_a_verdict_too(pool: RewardPool) -> None:
    texts = [TEXTS[name] for name in ("tower", "deep brackets", "NULs", "lone surrogates", "import", "nested boxes")]
    assert {verdict.reason for verdict in pool.judge([Item("Answer: 5 \\boxed{5}", text) for text in texts])} <= {"wrong", "unparsed"}


def test_none_of_these_cost_a_process(pool: RewardPool) -> None:
    assert pool.restarts == 0


def test_a_pattern_that_runs_away_is_ended() -> None:
    config = RewardConfig(verifiers=["regex"], options=["regex.pattern=(a+)+$"], workers=1, timeout_s=1.0)
    with RewardPool(config) as pool:
        verdicts = pool.judge([Item("aaa", "aaa"), Item("a" * 60 + "b", "aaa"), Item("aaa", "aaa")])
    assert [verdict.reason for verdict in verdicts] == ["correct", "timeout", "correct"]
