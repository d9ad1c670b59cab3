"""Verifiers of MindSpeed-RL under its names, with its scores, where they differ from ours. Their comparing is ours (`symbolic.py`)."""

from __future__ import annotations

import re
from typing import Any

from rlcli.rewards.extract import last_box
from rlcli.rewards.form import answer_in_tags, tag_places
from rlcli.rewards.symbolic import compare, shown, warm_up
from rlcli.rewards.verdicts import decide, no_answer, verifier
from rlcli.types import Verdict

STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
TOOL_CALL = re.compile(r"</tool_call>|</code>")


@verifier(wrong=-0.5, shown=shown, warm_up=warm_up)
def acc(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """The last box equals the truth by algebra: 1; it does not: -0.5; no box: -1."""
    answer = last_box(text)
    if not answer:
        return no_answer(-1.0)
    verdict = compare(answer, truth)
    verdict.score = 1.0 if verdict.correct else -0.5
    return verdict


@verifier(shown=shown, warm_up=warm_up)
def boxed_math(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """The last box equals the truth by algebra: 1, else 0 (math_17k_acc, acc_for_ppo)."""
    answer = last_box(text)
    return compare(answer, truth) if answer else no_answer()


@verifier(shown=shown, warm_up=warm_up)
def base_acc(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """The whole text is think tags, then answer tags with a box, and the box equals the truth by algebra: 1, else 0."""
    bare = text.strip()
    inside = answer_in_tags(text)
    if inside is None or not (bare.startswith("<think>") and bare.endswith("</answer>")):
        return no_answer()
    answer = last_box(inside)
    return compare(answer, truth) if answer else no_answer()


@verifier(wrong=-0.5, judges=False)
def strict_format(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """Each of the think and answer tags once, in order, <think> first and </answer> last: 1, else -0.5."""
    bare = text.strip()
    right = tag_places(bare) is not None and bare.startswith("<think>") and bare.endswith("</answer>")
    return decide(right, None, scores=(1.0, -0.5))


@verifier(judges=False)
def step(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """A third for each marker of a step (Step 1:, 1., a bullet, First, ...), at most 1."""
    count = len(STEPS.findall(text))
    return Verdict(min(count / 3, 1.0), count >= 3, f"{count} steps", "correct" if count >= 3 else "wrong")


@verifier(wrong=-1.0)
def retool_reward(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """The box in the last 100 characters is the truth to the letter: 1; else -1, and 0.1 more for each tool call, up to 0."""
    answer = last_box(text[-100:])
    if answer is not None and answer == truth.strip():
        return decide(True, answer)
    score = min(-1.0 + 0.1 * len(TOOL_CALL.findall(text)), 0.0)
    return decide(False, answer, scores=(1.0, score)) if answer is not None else no_answer(score)
