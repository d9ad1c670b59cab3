"""Answers without their dress: one way of writing for what TeX, Markdown and keyboards write in several.

All patterns take at most quadratic time, and what is longer than MOST_ANSWER characters is cut (the longest answer of the MATH test set
has 159).
"""

# ruff: noqa: RUF001
from __future__ import annotations

import re

from rlcli.rewards.extract import last_box

MOST_ANSWER = 1000

CHARACTERS = {
    **dict(zip("，。：；（）％＋－＝／＜＞［］｛｝！＄￥、｜", ",.:;()%+-=/<>[]{}!$¥,|", strict=True)),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **dict.fromkeys("−–﹣", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f\u3000\u2002\u2003\t\r\n\f\v", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\x00", ""),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys("‘’", "'"),
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "÷": "/", "⁄": "/", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "±": "\\pm ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "θ": "\\theta ", "∅": "\\emptyset ",
    "²": "^{2}", "³": "^{3}", "º": "°", "½": " \\frac{1}{2}", "¼": " \\frac{1}{4}", "¾": " \\frac{3}{4}", "⅓": " \\frac{1}{3}", "⅔": " \\frac{2}{3}",
}  # fmt: skip
TABLE = str.maketrans(CHARACTERS)

SPACES = re.compile(r"\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])")
DROPPED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits|hfill)(?![A-Za-z])\.?|\\!")
RENAMED = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\(?:varnothing|empty)(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])|\^\s*\{?°\}?"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$"), "¤"),
)
WORDS = re.compile(
    r"\\(?:text(?:normal|rm|bf|it|sf|tt)?|mbox|mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|bold|emph|operatorname\*?)\s*\{([^{}]*)\}"
)
BARE_FRACTION = re.compile(r"\\frac\s*(\d|[A-Za-z]|\{[^{}]*\})\s*(\d|[A-Za-z]|\{[^{}]*\})")
BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])")
PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'"))
DIGITS = re.compile(r"\d+")


def clean(answer: str) -> str:
    """One line without wrappers, fonts, TeX spacing and thousands separators: "$\\dfrac12$." and "\\boxed{\\frac{1}{2}}" give the same."""
    answer = answer[:MOST_ANSWER].translate(TABLE)
    answer = answer.replace("\\\\", "\\cr ") if "\\begin" in answer else re.sub(r"\\\\(?=[A-Za-z])", r"\\", answer)
    answer = undress(answer)
    answer = SPACES.sub(" ", DROPPED.sub("", answer).replace("{,}", ","))
    for pattern, name in RENAMED:
        answer = pattern.sub(name, answer)
    answer = repeat(WORDS, r" \1 ", answer)
    answer = dollars(answer)
    answer = BARE_ROOT.sub(r"\\sqrt{\1}", BARE_FRACTION.sub(lambda match: f"\\frac{braced(match[1])}{braced(match[2])}", answer))
    return join_thousands(undress(" ".join(answer.split())))


def undress(answer: str) -> str:
    """Without what stands around it: maths delimiters, bold, quotes, boxes, a full stop."""
    for _ in range(8):
        before = answer
        answer = answer.strip().rstrip(",;")
        if answer.endswith(".") and not answer.endswith(".."):
            answer = answer[:-1].rstrip()
        for left, right in PAIRS:
            inside = answer[len(left) : len(answer) - len(right)]
            if answer.startswith(left) and answer.endswith(right) and len(answer) > len(left + right) and left not in inside and right not in inside:
                answer = inside.strip()
        if answer.startswith(("\\boxed", "\\fbox")):
            answer = last_box(answer) or answer
        if answer == before:
            break
    return answer


def repeat(pattern: re.Pattern[str], replacement: str, text: str, times: int = 6) -> str:
    """Replace from the inside out, for nested commands."""
    for _ in range(times):
        text, count = pattern.subn(replacement, text)
        if not count:
            break
    return text


def braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def dollars(answer: str) -> str:
    """Dollar signs in pairs delimit maths and go; one that is left before a digit is a currency's."""
    if answer.count("$") % 2 == 0:
        return answer.replace("$", " ")
    return re.sub(r"\$(?=\s*[\d.])", "¤", answer, count=1).replace("$", " ")


def join_thousands(answer: str) -> str:
    """Thousands separated by a space or a comma, joined: "1 000 000", "12,345.6". Not by a comma within brackets: (1,234) is a pair."""
    answer = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)", lambda match: match[0].replace(" ", ""), answer)
    if re.search(r"[(\[{]", answer.replace("\\frac{", "").replace("^{", "")):
        return answer
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""), answer)
