"""The normalisation by which the DAPO paper's rule compares answers: Lewkowycz et al. 2022 (Minerva), appendix D.1.

The words and their order are the published rule's, quirks included ("an " and "a " go wherever they stand, so do the letters of
"units"), since scores are to be comparable with the paper's. Our own, better informed comparison is in `plain.py`.
"""

from __future__ import annotations

import re

MOST_ANSWER = 2000  # characters; the rule reads no more than 300 of a response, so only a truth can be longer, and is left as it is
REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet", "minutes"),
    *("digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
MATHS = re.compile(r"(.*?)\$(.*?)\$(.*)")
WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
BOXED = re.compile(r"\\boxed\{(.*)\}")
SHORT_FRACTION = re.compile(r"frac([^{])(.)")
SHORT_ROOT = re.compile(r"sqrt([^{])")


def normalise(answer: str) -> str:
    """The answer as the rule compares it: what follows its last "=", without units, wrappers, spaces and thousands separators."""
    if len(answer) > MOST_ANSWER:
        return answer.strip()
    answer = answer.split("=")[-1]
    for old, new in REPLACED:
        answer = answer.replace(old, new)
    for expression in REMOVED:
        answer = answer.replace(expression, "")
    answer = MATHS.sub(r"$\2$", answer)
    for wrapper in WRAPPERS:
        answer = wrapper.sub(r"\1", answer)
    answer = BOXED.sub(r"\1", answer)
    answer = SHORT_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = SHORT_ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
