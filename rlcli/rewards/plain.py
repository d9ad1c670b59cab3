"""Comparing short answers by their form: numbers with units, lists, sets, tuples, intervals, unions, matrices, names ("x = 5"), words.

What stands in the slots of that form is compared by a function that the caller chooses: as text (`same_answer`), or by algebra
(`symbolic.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rlcli.rewards.clean import MOST_ANSWER, clean
from rlcli.rewards.numbers import read_number
from rlcli.rewards.units import read_currency, read_unit, same_quantity

MOST_ITEMS = 64
MOST_DEPTH = 8

NAME = re.compile(r"(?P<name>\\?[A-Za-z][A-Za-z ]*(?:_(?:\w|\{\w+\}))?'?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?)\s*(?:=|\\in(?![A-Za-z]))\s*(?P<value>[^=]+)")
MATRIX = re.compile(r"\\begin\{(?P<kind>[a-z]*matrix|array)\}(?:\{[lcr|]*\})?(?P<body>.*)\\end\{(?P=kind)\}", re.DOTALL)
WORDS = re.compile(r"[^\W\d_][^\W\d_ '\-]*(?:[ '\-]+[^\W\d_]+)*")
RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![A-Za-z])")
OPEN, CLOSE = "([{", ")]}"
SAME = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}

Leaf = Callable[[str, str], bool]


@dataclass(frozen=True)
class Number:
    value: Fraction
    unit: str
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Many:
    """kind: list, set, union, matrix, determinant, row, or the two brackets of a tuple or an interval."""

    kind: str
    items: tuple[Value, ...]
    text: str = field(default="", compare=False)

    @property
    def ordered(self) -> bool:
        return self.kind not in ("list", "set", "union")


@dataclass(frozen=True)
class Named:
    name: str
    value: Value


Value = Number | Text | Many | Named


def same_answer(answer: str, truth: str, leaf: Leaf | None = None) -> bool:
    """Whether an answer says the same as the truth. `leaf` compares what is neither number nor form; by default as text.

    A comma between groups of three digits is taken as a thousands separator, and as a list's where only that fits the other side.
    """
    if max(len(answer), len(truth)) > MOST_ANSWER:
        return answer.strip() == truth.strip()
    left, right = clean(answer), clean(truth)
    if not left or not right:
        return False
    leaf = leaf or same_text
    if left == right or equal(read(left), read(right), leaf):
        return True
    if re.search(r"\d,\d{3}", answer + truth) and ("," in left or "," in right):
        return equal(read(clean(answer.replace(",", ", "))), read(clean(truth.replace(",", ", "))), leaf)
    return False


def read(text: str, depth: int = 0) -> Value:
    """The form of a cleaned answer."""
    text = text.strip()
    if depth < MOST_DEPTH:
        for reader in (read_quantity, read_named, read_union, read_list, read_brackets, read_matrix):
            value = reader(text, depth)
            if value is not None:
                return value if isinstance(value, Named) or value.text else replace(value, text=text)
    return Text(text)


def read_quantity(text: str, depth: int) -> Value | None:
    currency, bare = read_currency(text)
    number = read_number(bare)
    if number is None:
        return None
    unit = read_unit(number[1])
    return None if unit is None else Number(number[0], unit or currency, text)


def read_named(text: str, depth: int) -> Value | None:
    """x = 5, f(x) = 2x, y \\in (1,2). Of a chain (x = 2 + 3 = 5) the last counts."""
    parts = re.split(r"(?<![<>!\\])=", text)
    if len(parts) > 2 and len(split(text, ",;")) == 1:
        text = f"{parts[0]}={parts[-1]}"
    match = NAME.fullmatch(text)
    if match is None or len(split(text, ",;")) > 1:
        return None
    return Named(match["name"].replace(" ", ""), read(match["value"], depth + 1))


def read_union(text: str, depth: int) -> Value | None:
    parts = re.split(r"\\cup(?![A-Za-z])", text)
    return many("union", parts, depth) if len(parts) > 1 else None


def read_list(text: str, depth: int) -> Value | None:
    """Items between commas, semicolons, "and" or "or" outside brackets; one with a plus-or-minus sign counts as two."""
    parts = split(re.sub(r"(?<![A-Za-z\\])(?:and|or|和|或)(?![A-Za-z])", ",", text), ",;、")
    parts = [part for part in parts if part.strip()]
    spread = [twin for part in parts for twin in twins(part)]
    return many("list", spread, depth) if len(spread) > 1 else None


def twins(text: str) -> list[str]:
    """a \\pm b as a + b and a - b; anything else as it is."""
    parts = re.split(r"\\pm(?![A-Za-z])", text)
    if len(parts) != 2 or any(text.count(bracket) for bracket in "(["):
        return [text]
    left, right = parts[0].strip(), parts[1].strip()
    return [f"{left}+{right}" if left else right, f"{left}-{right}"]


def read_brackets(text: str, depth: int) -> Value | None:
    """(a, b), [a, b), \\{a, b\\}; brackets around a single thing are dropped."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening.lstrip("\\") not in OPEN or closing.lstrip("\\") not in CLOSE or not opening or len(text) < len(opening + closing):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    if not balanced(inside):
        return None
    parts = split(inside, ",;")
    if opening in ("{", "\\{"):
        return many("set", [twin for part in parts for twin in twins(part)], depth) if SAME[opening] == closing else None
    if len(parts) > 1:
        return many(opening + closing, parts, depth)
    return read(inside, depth + 1) if opening == "(" and closing == ")" else None


def read_matrix(text: str, depth: int) -> Value | None:
    match = MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in match["body"].split("\\cr ") if row.strip()]
    kind = "determinant" if match["kind"] == "vmatrix" else "matrix"
    items = [many("row", split(row, "&"), depth + 1) for row in rows]
    return None if not rows or None in items else Many(kind, tuple(item for item in items if item is not None))


def many(kind: str, parts: Sequence[str], depth: int) -> Many | None:
    return None if len(parts) > MOST_ITEMS else Many(kind, tuple(read(part, depth + 1) for part in parts))


def split(text: str, separators: str) -> list[str]:
    """The parts between separators outside all brackets and braces."""
    parts, start, depth = [], 0, 0
    for index, character in enumerate(text):
        if character in OPEN:
            depth += 1
        elif character in CLOSE:
            depth = max(depth - 1, 0)
        elif depth == 0 and character in separators and text[index - 1 : index] != "\\":
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def balanced(text: str) -> bool:
    """No closing bracket comes before its opening one, whatever its kind: (1,2] is an interval."""
    depth = 0
    for character in text:
        depth += (character in OPEN) - (character in CLOSE)
        if depth < 0:
            return False
    return depth == 0


def equal(left: Value, right: Value, leaf: Leaf) -> bool:
    """Whether two values are the same. Names must agree where both sides have one; a set of one thing equals the thing."""
    if isinstance(left, Named) and isinstance(right, Named):
        return left.name == right.name and equal(left.value, right.value, leaf)
    if isinstance(left, Named):
        return equal(left.value, right, leaf)
    if isinstance(right, Named):
        return equal(left, right.value, leaf)
    if isinstance(left, Number) and isinstance(right, Number):
        return same_quantity((left.value, left.unit), (right.value, right.unit))
    if isinstance(left, Many) and isinstance(right, Many):
        return same_items(left, right, leaf)
    if isinstance(left, Many) and left.kind == "set" and len(left.items) == 1:
        return equal(left.items[0], right, leaf)
    if isinstance(right, Many) and right.kind == "set" and len(right.items) == 1:
        return equal(left, right.items[0], leaf)
    if (isinstance(left, Many) or isinstance(right, Many)) and not RELATION.search(left.text + right.text):
        return False  # only an inequality may say the same as an interval
    return leaf(left.text, right.text)


def same_items(left: Many, right: Many, leaf: Leaf) -> bool:
    """In order for tuples, intervals and matrices, else in any order; a bare list also matches a set or a tuple."""
    kinds = {left.kind, right.kind}
    if len(left.items) != len(right.items) or (left.kind != right.kind and kinds not in ({"list", "set"}, {"list", "()"})):
        return False
    if left.ordered or right.ordered:
        return all(equal(a, b, leaf) for a, b in zip(left.items, right.items, strict=True))
    rest = list(right.items)
    for item in left.items:
        match = next((index for index, other in enumerate(rest) if equal(item, other, leaf)), None)
        if match is None:
            return False
        rest.pop(match)
    return True


def same_text(left: str, right: str) -> bool:
    """Equal but for spaces, braces around one character, and the case of words."""
    if WORDS.fullmatch(left) and WORDS.fullmatch(right) and len(left) > 1:
        return left.casefold().split() == right.casefold().split()
    return squeeze(left) == squeeze(right)


def squeeze(text: str) -> str:
    text = re.sub(r"\{(\w)\}", r"\1", text.replace(" ", ""))
    return re.sub(r"\\(?:cdot|times)(?![A-Za-z])|\*", "", text)
