"""Verifiers that compare the answer of a response with the row's: the DAPO paper's rule, boxed answers, exact text."""

from __future__ import annotations

from typing import Any

from rlcli.rewards import minerva
from rlcli.rewards.clean import clean
from rlcli.rewards.extract import last_answer_line, last_box
from rlcli.rewards.plain import same_answer
from rlcli.rewards.verdicts import decide, no_answer, verifier
from rlcli.types import Verdict


@verifier(wrong=-1.0, shown=minerva.normalise)
def dapo(text: str, truth: str, extra: dict[str, Any], *, window: int = 300) -> Verdict:
    """The DAPO paper's rule: the last "Answer:" line of the last 300 characters equals the truth after Minerva's normalisation; 1 or -1.

    A right answer in a box without "Answer:" is wrong here, as it is in the paper's code.
    """
    answer = last_answer_line(text, window)
    if answer is None:
        return no_answer(-1.0)
    return decide(minerva.normalise(answer) == minerva.normalise(truth), answer.strip(), scores=(1.0, -1.0))


@verifier(shown=clean)
def boxed(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """The last \\boxed{...} equals the truth as text or as a number, after our own normalisation; 1 or 0. No algebra."""
    answer = last_box(text)
    if not answer:
        return no_answer()
    return decide(same_answer(answer, truth), answer)


@verifier(shown=str.strip)
def exact(text: str, truth: str, extra: dict[str, Any], *, ignore_case: bool = False) -> Verdict:
    """The whole response equals the truth but for white space around it; 1 or 0."""
    answer, wanted = text.strip(), truth.strip()
    if not answer:
        return no_answer()
    right = answer.casefold() == wanted.casefold() if ignore_case else answer == wanted
    return decide(right, answer)
