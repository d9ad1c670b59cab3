"""Where an answer stands in a response that may say it in several ways."""

# ruff: noqa: RUF001
from __future__ import annotations

import re

from rlcli.rewards.extract import boxes

WINDOW = 2000  # characters at the end in which an answer without a box is looked for

TAGGED = re.compile(r"<answer>([^<]*(?:<(?!/answer>|answer>)[^<]*)*)</answer>", re.IGNORECASE)
MARKED = re.compile(r"(?:\banswer\b\s*(?:is|:|=)|答案\s*(?:是|为|：|:)|####)\s*:?\s*\**\s*([^\n]+)", re.IGNORECASE)
SPAN = r"(?:\$\$[^$]+\$\$|\$[^$\n]+\$|\\\([^\n]+?\\\)|\\\[.+?\\\])"
SPANS = re.compile(rf"{SPAN}(?:\s*(?:,\s*and|,\s*or|,|and|or)\s*{SPAN})*", re.DOTALL)
NUMBER = re.compile(r"[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?")
JOINED = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})*", re.IGNORECASE)


def find_answer(text: str, truth: str, boxed_only: bool = False) -> str | None:
    """The answer of a response, or None: the last box; else the <answer> tag; else after "answer is", "Answer:", "####"; else the last
    formula; else the last number. All but the box within the last 2,000 characters.

    Where the truth is a list, boxes that only commas, "and" or "or" part count as one.
    """
    found = boxes(text)
    if found or boxed_only:
        return from_boxes(text, found, truth) if found else None
    tail = text[-WINDOW:]
    tagged = TAGGED.findall(tail)
    if tagged and tagged[-1].strip():
        return tagged[-1].strip()
    marked = [match for match in MARKED.findall(tail) if match.strip(" *$.")]
    if marked:
        return sentence(marked[-1])
    formulas = SPANS.findall(tail)
    if formulas:
        return formulas[-1]
    numbers = NUMBER.findall(tail)
    return numbers[-1].rstrip(",") if numbers else None


def from_boxes(text: str, found: list[tuple[int, int, str]], truth: str) -> str:
    """The content of the last box, with those of the boxes before it that it belongs to where the truth is a list."""
    contents = [found[-1][2].strip()]
    if re.search(r"[,;]|\b(?:and|or)\b|\\pm", truth) and not re.fullmatch(r"\s*\d{1,3}(?:,\d{3})+\s*", truth):
        for left, right in zip(found[-2::-1], found[::-1], strict=False):
            if JOINED.fullmatch(text, left[1], right[0]) is None or any(mark in right[2] for mark in ",;"):
                break
            contents.insert(0, left[2].strip())
    return ", ".join(contents)


def sentence(rest: str) -> str:
    """What an announced answer is, of the rest of its line: the formulas that it begins with, or its first sentence."""
    rest = rest.strip().rstrip("*").strip()
    formulas = SPANS.match(rest)
    return formulas.group() if formulas else re.split(r"(?<!\d)\.\s|\.\s(?!\d)|[。;]\s", rest, maxsplit=1)[0]
