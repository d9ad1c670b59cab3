"""`math`: answers that are equal by algebra. Our own reading of their form comes first; math-verify (on SymPy) compares the rest.

What we keep from the library, since it misjudges it: words (it multiplies letters, so "east" equals "seat"), numbers in another base
(52_8 would equal 52), tuples, sets and lists, percentages and units (all in `plain.py`). What is still misjudged is listed in the
table of cases (tests/rewards/cases.py).

Nothing of the text is evaluated as Python: only the library's TeX grammar is used, never its reader of plain expressions, which is
built on `eval`. Numbers too large to be meant are refused before they are computed.
"""

from __future__ import annotations

import logging
import math as maths
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify

from rlcli.rewards.clean import clean
from rlcli.rewards.locate import find_answer
from rlcli.rewards.plain import WORDS, Number, Text, read, same_answer, same_text
from rlcli.rewards.verdicts import decide, no_answer, unparsed, verifier
from rlcli.types import Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off; the process has a better one

MOST_BITS = 1e5  # of a number, before it counts as too large to be meant
MOST_NESTING = 16  # of brackets and braces; the grammar's time grows steeply with it
NORMALISATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
CONVERSION = ConversionConfig(lowercase_symbols=False)
FUNCTIONS = re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|infty|theta|alpha|beta)(?![A-Za-z])")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
SLOW = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
INDEXED = re.compile(r"\\(?:sum|prod)(?![A-Za-z])")
BASE = re.compile(r"\d\s*_")
WARM_UP = (
    ("\\frac{1}{2}x + \\sqrt{3}", "\\sin x^2"),
    ("x^2 + 6x + 9", "(x+3)^2"),
    ("(x-3)^2", "9 - 6x + x^2"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
    ("3\\sqrt{2}", "\\sqrt{18}"),
    ("\\sqrt{2} \\cdot 5", "\\sqrt{50}"),
    ("\\frac{\\pi}{2}", "\\frac{1}{2}\\pi"),
    ("\\pi/2", "2 - 3i"),
    ("\\log_2 8", "\\ln 3"),
    ("x = 2y + 1", "2y - x = -1"),
    ("x \\le 5", "5 \\ge x"),
)


class Algebra:
    """Compares by algebra, and remembers whether an answer could not be read."""

    def __init__(self) -> None:
        self.unreadable = False

    def __call__(self, answer: str, truth: str) -> bool:
        if same_text(answer, truth):
            return True
        if is_words(answer) or is_words(truth) or BASE.search(answer + truth):
            return False
        complex_ = bool(IMAGINARY.search(answer + " " + truth)) and not INDEXED.search(answer + truth)
        self.unreadable |= parse(answer, complex_) is None
        return same_value(answer, truth, complex_)


@lru_cache(maxsize=4096)
def same_value(answer: str, truth: str, complex_: bool) -> bool:
    """Whether two cleaned answers are the same by algebra. It remembers, since the answers of a group are often the same."""
    left, right = parse(answer, complex_), parse(truth, complex_)
    if left is None or right is None or differ(left, right):
        return False
    return bool(verify(right, left, allow_set_relation_comp=True, timeout_seconds=None))


def differ(left: Any, right: Any) -> bool:
    """Whether two expressions clearly differ at one point, which spares the long search for a proof that they do not.

    False where it cannot be told: for what is no expression, for names, near equality, or a value that does not come out finite.
    """
    if not all(isinstance(side, sympy.Expr) and not side.is_Symbol and not side.has(*SLOW) for side in (left, right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: sympy.Float(0.5 + (0.6180339887 * (number + 1)) % 1.0) for number, symbol in enumerate(symbols)}
    try:
        a, b = (complex(side.evalf(15, subs=point)) for side in (left, right))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    size = abs(a) + abs(b)
    return maths.isfinite(size) and abs(a - b) > 1e-4 * max(size, 1.0)


def is_words(text: str) -> bool:
    """Whether it is written as words rather than as a product of variables: letters alone, three or more together."""
    return bool(WORDS.fullmatch(text)) and max(map(len, text.split())) > 2


@lru_cache(maxsize=1024)
def parse(text: str, complex_: bool) -> Any:
    """A cleaned answer as a SymPy object, or None where it is no mathematics, or too large a number."""
    if nesting(text) > MOST_NESTING:
        return None
    text = FUNCTIONS.sub(r"\\\1", roots(text.replace("**", "^")))
    try:
        tex = normalize_latex(text, NORMALISATION)
        value = latex2sympy(tex, is_real=not complex_, convert_degrees=False, normalization_config=None, conversion_config=CONVERSION)
        if isinstance(value, str) or bits(value) > MOST_BITS:
            return None
        return value.xreplace({sympy.Symbol("i", real=False): sympy.I}) if complex_ else value
    except MemoryError:
        raise
    except Exception:  # the grammar's errors have no common type
        return None


def nesting(text: str) -> int:
    """How deep brackets and braces are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def roots(text: str) -> str:
    """sqrt(...) as \\sqrt{...}, with the bracket that belongs to it."""
    for _ in range(8):
        match = re.search(r"\\?sqrt\s*\(", text)
        if match is None:
            break
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[: match.start()]}\\sqrt{{{text[match.end() : end - (depth == 0)]}}}{text[end:]}"
    return text


def bits(value: Any) -> float:
    """An upper estimate of the bits of the largest number that evaluating an expression would make."""
    if isinstance(value, sympy.Integer):
        return float(int(value).bit_length())
    if isinstance(value, (sympy.Rational, sympy.Float)):
        return float(max(abs(value.p), value.q).bit_length()) if isinstance(value, sympy.Rational) else 53.0
    parts = [bits(part) for part in getattr(value, "args", ())]
    largest = max(parts, default=1.0)
    if isinstance(value, sympy.Pow):
        return max(largest, parts[0] * 2.0 ** min(parts[1], 1000.0)) if value.args[0].is_number and value.args[1].is_number else largest
    if isinstance(value, (sympy.factorial, sympy.binomial)):
        return max(largest, 2.0 ** min(largest, 1000.0) * largest)
    return largest + maths.log2(len(parts)) if isinstance(value, sympy.Add) and parts else max(largest, sum(parts) if isinstance(value, sympy.Mul) else 0.0)


def compare(answer: str, truth: str) -> Verdict:
    """The verdict on an extracted answer: 1 where it equals the truth, else 0, and unparsed where it could not be read."""
    algebra = Algebra()
    if same_answer(answer, truth, algebra):
        return decide(True, answer)
    return unparsed(answer) if algebra.unreadable else decide(False, answer)


def warm_up() -> None:
    """Let the parser build its tables and SymPy load its parts, which their first calls do, at a hundred times the usual cost."""
    for left, right in WARM_UP:
        Algebra()(clean(left), clean(right))


def shown(answer: str) -> str:
    """A cleaned answer, and how the algebra reads it where it does."""
    cleaned = clean(answer)
    form = read(cleaned)
    if isinstance(form, Text) and not is_words(cleaned) and not BASE.search(cleaned):
        parsed = parse(cleaned, False)
        return f"{cleaned}  [{'not readable' if parsed is None else parsed}]"
    return f"{cleaned}  [{form.value if isinstance(form, Number) else getattr(form, 'kind', 'text')}]"


@verifier(shown=shown, warm_up=warm_up)
def math(text: str, truth: str, extra: dict[str, Any], *, boxed: bool = False) -> Verdict:
    """The answer equals the truth by algebra; 1 or 0. Looked for in the last box, else (boxed=false) where `find_answer` says."""
    answer = find_answer(text, truth, boxed_only=boxed)
    return compare(answer, truth) if answer else no_answer()
