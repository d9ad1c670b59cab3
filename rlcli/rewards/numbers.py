"""Numbers as people write them, read exactly. Nothing is evaluated: a pattern either fits or does not."""

from __future__ import annotations

import re
from fractions import Fraction

MOST_DIGITS = 300
MOST_EXPONENT = 400

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
RATIO = rf"\\frac\{{(?P<above>[+-]?{DECIMAL})\}}\{{(?P<below>[+-]?{DECIMAL})\}}|(?P<left>{DECIMAL})/(?P<right>{DECIMAL})"
POWER = r"\^(?:\{(?P<exponent1>[+-]?\d{1,4})\}|(?P<exponent2>[+-]?\d{1,4}))"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s*(?P<mixed>\\frac\{{\d+\}}\{{\d+\}}|(?<=\s)\d+/\d+)|{RATIO}"
    rf"|(?:(?P<factor>{DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10{POWER}|(?P<mantissa>{DECIMAL})(?:[eE](?P<exponent3>[+-]?\d{{1,4}}))?)"
)


def read_number(text: str) -> tuple[Fraction, str] | None:
    """The number at the start of a cleaned answer and what follows it: an integer, decimal, fraction, mixed number or power of ten.

    None where none stands there, or where it is too large to be meant.
    """
    match = NUMBER.match(text)
    if match is None or match.end() > MOST_DIGITS:
        return None
    rest = text[match.end() :]
    if rest[:1] in ("^", "_", "!", "/", "*", "\\") and not rest.startswith(("\\%", "\\$")):
        return None
    try:
        value = magnitude(match)
    except (ValueError, ZeroDivisionError):
        return None
    return (-value if match["sign"] == "-" else value), rest


def magnitude(match: re.Match[str]) -> Fraction:
    """The value of a match without its sign. Errors: ZeroDivisionError, ValueError for an exponent out of range."""
    if match["mixed"]:
        above, below = re.findall(r"\d+", match["mixed"])
        return int(match["whole"]) + Fraction(int(above), int(below))
    if match["above"]:
        return Fraction(match["above"]) / Fraction(match["below"])
    if match["left"]:
        return Fraction(match["left"]) / Fraction(match["right"])
    exponent = int(match["exponent1"] or match["exponent2"] or match["exponent3"] or 0)
    if abs(exponent) > MOST_EXPONENT:
        raise ValueError(f"exponent {exponent}")
    return Fraction(match["factor"] or match["mantissa"] or 1) * Fraction(10) ** exponent
