"""Verifiers of form: think and answer tags, length, a regular expression."""

from __future__ import annotations

import re
from typing import Any

from rlcli.errors import UserError
from rlcli.rewards.verdicts import decide, no_answer, unparsed, verifier
from rlcli.types import Verdict

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tag_places(text: str) -> list[int] | None:
    """Where the four tags stand, or None unless each stands once, in order."""
    places = [text.find(tag) for tag in TAGS]
    once = all(text.count(tag) == 1 for tag in TAGS)
    return places if once and places == sorted(places) else None


def answer_in_tags(text: str) -> str | None:
    """What stands in the last <answer> tag after a closed <think> one, or None."""
    end = text.rfind(TAGS[3])
    start = text.rfind(TAGS[2], 0, end) if end >= 0 else -1
    closed = text.rfind(TAGS[1], 0, start) if start >= 0 else -1
    return text[start + len(TAGS[2]) : end] if closed >= 0 and text.find(TAGS[0], 0, closed) >= 0 else None


@verifier(judges=False)
def format_(text: str, truth: str, extra: dict[str, Any], *, strict: bool = False, opened: bool = False) -> Verdict:
    """<think>...</think> and then <answer>...</answer>; 1 or 0.

    strict: each tag once, nothing but white space around and between the two, neither empty. opened: the prompt's template has already
    written <think>, so the response begins inside it.
    """
    text = TAGS[0] + text if opened else text
    answer = answer_in_tags(text)
    if answer is None:
        return no_answer()
    return decide(not strict or is_strict(text), answer.strip())


def is_strict(text: str) -> bool:
    places = tag_places(text)
    if places is None:
        return False
    ends = [place + len(tag) for place, tag in zip(places, TAGS, strict=True)]
    outside = (text[: places[0]], text[ends[1] : places[2]], text[ends[3] :])
    inside = (text[ends[0] : places[1]], text[ends[2] : places[3]])
    return not any(part.strip() for part in outside) and all(part.strip() for part in inside)


def check_length(least: int, most: int, taper: int, unit: str) -> None:
    if unit not in ("characters", "words", "lines"):
        raise UserError(f"reward.options: length.unit is characters, words or lines, not {unit!r}")
    if not 0 <= least <= most or taper < 0:
        raise UserError(f"reward.options: length needs 0 <= least <= most and taper >= 0, not least={least}, most={most}, taper={taper}")


@verifier(judges=False, check=check_length)
def length(
    text: str, truth: str, extra: dict[str, Any], *, least: int = 1, most: int = 4000, taper: int = 0, unit: str = "characters"
) -> Verdict:
    """The response is between `least` and `most` long; 1 or 0, falling linearly to 0 over `taper` more beyond `most`.

    unit: characters, words or lines. (The penalty on tokens near the longest response is reward.overlong_buffer_tokens.)
    """
    size = {"characters": len, "words": lambda part: len(part.split()), "lines": lambda part: len(part.splitlines())}[unit](text)
    right = least <= size <= most
    score = max(1.0 - (size - most) / taper, 0.0) if taper and size > most else float(right)
    return Verdict(score, right, f"{size} {unit}", "correct" if right else "wrong")


def check_regex(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"reward.options: regex.pattern is not a regular expression: {error}") from None


@verifier(check=check_regex)
def regex(text: str, truth: str, extra: dict[str, Any], *, pattern: str = "") -> Verdict:
    """A regular expression (Python's, multi-line, dot matches newline); 1 or 0.

    Without a group, finding it is right. With a group, the first group of its last match must equal the truth but for white space.
    Without `pattern`, the row's truth is the pattern. A pattern that runs away is ended by the time limit.
    """
    if not pattern and not truth:
        return unparsed("")
    compiled = re.compile(pattern or truth, re.MULTILINE | re.DOTALL)
    matches = compiled.finditer(text)
    match = next(matches, None)
    if compiled.groups:
        for later in matches:
            match = later
    if match is None:
        return no_answer()
    if not compiled.groups or not pattern:
        return decide(True, match.group())
    answer = (match.group(1) or "").strip()
    return decide(answer == truth.strip(), answer)
