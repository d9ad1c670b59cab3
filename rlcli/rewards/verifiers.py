"""Verifiers by name: built-in ones, and a user's own as package.module:function. Several with weights make one."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.errors import UserError
from rlcli.rewards.verdicts import REASONS, decide
from rlcli.types import Verdict

BUILT_IN = {
    "dapo": "rlcli.rewards.answers:dapo",
    "boxed": "rlcli.rewards.answers:boxed",
    "exact": "rlcli.rewards.answers:exact",
    "math": "rlcli.rewards.symbolic:math",
    "format": "rlcli.rewards.form:format_",
    "length": "rlcli.rewards.form:length",
    "regex": "rlcli.rewards.form:regex",
    # The predecessor's, by its names and with its scores.
    "acc": "rlcli.rewards.predecessor:acc",
    "acc_for_dapo": "rlcli.rewards.answers:dapo",
    "math_17k_acc": "rlcli.rewards.predecessor:boxed_math",
    "acc_for_ppo": "rlcli.rewards.predecessor:boxed_math",
    "base_acc": "rlcli.rewards.predecessor:base_acc",
    "math_verify_reward": "rlcli.rewards.predecessor:base_acc",
    "strict_format": "rlcli.rewards.predecessor:strict_format",
    "step": "rlcli.rewards.predecessor:step",
    "retool_reward": "rlcli.rewards.predecessor:retool_reward",
}


@dataclass(frozen=True)
class Verifier:
    """One verifier with its options bound. function(text, truth, extra) -> Verdict."""

    name: str
    function: Callable[[str, str, dict[str, Any]], Verdict]
    wrong_score: float
    judges: bool
    warm_up: Callable[[], None] | None = None
    shown: Callable[[str], str] | None = None  # an answer in the form in which it is compared


@dataclass(frozen=True)
class Combined:
    """Several verifiers as one: the score is the weighted sum; the rest is said by the first that judges correctness."""

    parts: tuple[Verifier, ...]
    weights: tuple[float, ...]

    @property
    def wrong_score(self) -> float:
        """Score of an answer that is wrong for every part: what an answer gets whose judgement was lost."""
        return sum(weight * part.wrong_score for weight, part in zip(self.weights, self.parts, strict=True))

    @property
    def judge(self) -> int:
        """Index of the first part that judges correctness, or 0 where none does."""
        return next((index for index, part in enumerate(self.parts) if part.judges), 0)

    def verdicts(self, text: str, truth: str, extra: dict[str, Any]) -> list[Verdict]:
        """Each part's own verdict."""
        return [part.function(text, truth, extra) for part in self.parts]

    def combine(self, verdicts: Sequence[Verdict]) -> Verdict:
        """One verdict from the parts' own."""
        chief = verdicts[self.judge]
        score = sum(weight * verdict.score for weight, verdict in zip(self.weights, verdicts, strict=True))
        return Verdict(score, chief.correct, chief.answer, chief.reason)

    def warm_up(self) -> None:
        """Load now what the parts would load at their first call, so that no answer is charged with it."""
        for part in self.parts:
            if part.warm_up is not None:
                part.warm_up()

    def __call__(self, text: str, truth: str, extra: dict[str, Any]) -> Verdict:
        return self.combine(self.verdicts(text, truth, extra))


def check_names(names: Sequence[str], weights: Sequence[float], options: Sequence[str] = ()) -> None:
    """Raise UserError for an unknown name, for options of a verifier that is not used, and for weights that do not fit. Imports nothing."""
    if not names:
        raise UserError("reward.verifiers is empty: name at least one, for instance reward.verifiers=[dapo]")
    for name in names:
        if ":" not in name and name not in BUILT_IN:
            hint = nearest(name, BUILT_IN)
            raise UserError(f"unknown verifier {name!r} in reward.verifiers: {hint} (a function of your own is named package.module:function)")
    if len(weights) != len(names):
        raise UserError(f"reward.weights has {len(weights)} values for {len(names)} verifiers: give one weight for each")
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"reward.weights must be finite numbers, not {list(weights)}")
    read_options(names, options)


def read_options(names: Sequence[str], options: Sequence[str]) -> dict[str, dict[str, str]]:
    """Options written as NAME.OPTION=VALUE, by verifier. Errors: UserError for another form and for a verifier that is not used."""
    read: dict[str, dict[str, str]] = {name: {} for name in names}
    for option in options:
        left, equals, value = option.partition("=")
        name, dot, key = left.strip().rpartition(".")
        if not equals or not dot or not key:
            raise UserError(f"reward.options: {option!r} is not of the form NAME.OPTION=VALUE, for instance length.most=2000")
        if name not in read:
            raise UserError(f"reward.options: {option!r} is for a verifier that is not in reward.verifiers ({', '.join(names)})")
        read[name][key] = value
    return read


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known)}" if known else "there are none"


def resolve(names: Sequence[str], weights: Sequence[float] | None = None, options: Sequence[str] = ()) -> Combined:
    """The verifiers of these names as one, with their options bound; imports what they need. Errors: UserError."""
    weights = [1.0] * len(names) if weights is None else weights
    check_names(names, weights, options)
    read = read_options(names, options)
    return Combined(tuple(load(name, read[name]) for name in names), tuple(float(weight) for weight in weights))


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A verifier's options and their defaults: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def load(name: str, options: Mapping[str, str]) -> Verifier:
    """One verifier by name, its options read as the type of their defaults. Errors: UserError."""
    function = find(name)
    known = options_of(function)
    values = {}
    for key, text in options.items():
        if key not in known:
            raise UserError(f"reward.options: {name} has no option {key!r}: {nearest(key, known)}")
        values[key] = read_value(f"{name}.{key}", text, known[key])
    check = getattr(function, "check_options", None)
    if check is not None:
        check(**{**known, **values})

    def judge(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
        return as_verdict(name, function(text, truth, extra, **values))

    marks: dict[str, Any] = {"wrong_score": 0.0, "judges": True, "warm_up": None, "shown": None}
    return Verifier(name, judge, **{mark: getattr(function, mark, default) for mark, default in marks.items()})


def read_value(name: str, text: str, default: Any) -> Any:
    """An option's value as the type of its default (text where that is None). Errors: UserError."""
    kind = str if default is None or default is inspect.Parameter.empty else type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.strip().lower()]
        return kind(text)
    except (ValueError, KeyError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UserError(f"reward.options: {name} needs {words.get(kind, kind.__name__)}, not {text!r}") from None


def find(name: str) -> Callable[..., Any]:
    """The function that a name stands for. Errors: UserError where it cannot be imported or called."""
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    if not module_name or not attribute:
        raise UserError(f"verifier {name!r}: a function of your own is named package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the user's module may fail in any way
        raise UserError(f"verifier {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"verifier {name!r} is a {type(function).__name__}, not a function (text, truth, extra) -> Verdict")
    try:
        inspect.signature(function).bind("text", "truth", {})
    except TypeError as error:
        raise UserError(f"verifier {name!r} must take (text, truth, extra), its options keyword-only: {error}") from error
    return function


def as_verdict(name: str, result: Any) -> Verdict:
    """What a verifier returned, checked: a Verdict, or a plain number as the score (above 0 counts as correct)."""
    if isinstance(result, (bool, int, float)):
        result = decide(result > 0, None, scores=(float(result), float(result)))
    if not isinstance(result, Verdict):
        raise TypeError(f"verifier {name} returned a {type(result).__name__}, not a Verdict or a number")
    if not math.isfinite(result.score):
        raise ValueError(f"verifier {name} returned the score {result.score}")
    if result.reason not in REASONS:
        raise ValueError(f"verifier {name} returned the reason {result.reason!r}, which is none of {', '.join(REASONS)}")
    return result
