"""Making verdicts: the five ways in which a judgement ends, and how a verifier says what a wrong answer scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rlcli.types import Verdict

REASONS = ("correct", "wrong", "no_answer", "unparsed", "timeout", "crashed")
VerifierFunction = Callable[..., Any]
F = TypeVar("F", bound=VerifierFunction)


def verifier(
    *,
    wrong: float = 0.0,
    judges: bool = True,
    shown: Callable[[str], str] | None = None,
    warm_up: Callable[[], None] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Mark a function as a verifier: (text, truth, extra, *, options...) -> Verdict.

    wrong: the score of a wrong answer, which an answer gets whose judgement was lost to a time limit or a crash.
    judges: whether `correct` says that the answer is right; False for verifiers of form alone (format, length).
    shown: an answer in the form in which it is compared, for `msrl reward check`.
    warm_up: called once in each process before the first answer, to load what a first call would load.
    check: called with all options as keywords; raises UserError for values that cannot be.
    """

    def mark(function: F) -> F:
        marks = {"wrong_score": wrong, "judges": judges, "shown": shown, "warm_up": warm_up, "check_options": check}
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


def decide(right: bool, answer: str | None, *, scores: tuple[float, float] = (1.0, 0.0)) -> Verdict:
    """The verdict on an answer that could be compared; `scores` are those of a right and of a wrong one."""
    return Verdict(scores[0] if right else scores[1], right, answer, "correct" if right else "wrong")


def no_answer(score: float = 0.0) -> Verdict:
    """The response holds no answer in the form that the verifier looks for."""
    return Verdict(score, False, None, "no_answer")


def unparsed(answer: str, score: float = 0.0) -> Verdict:
    """An answer was found and could not be read as what the verifier compares."""
    return Verdict(score, False, answer, "unparsed")


def count_reasons(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts ended for each reason; every reason is named, with 0 where none did."""
    counts = Counter(verdict.reason for verdict in verdicts)
    return {reason: counts[reason] for reason in REASONS}
