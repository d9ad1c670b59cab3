"""Finding the answer in a response. Everything here takes time linear in the length of the text, whatever the text."""

from __future__ import annotations

import re

ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
MOST_TEXT = 200_000  # characters
FIRST_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*\n?[ \t]*(?P<rest>\{|[^\s$\\{}]+|)|\\.|[{}]", re.DOTALL)


def last_answer_line(text: str, window: int = 300) -> str | None:
    """What follows the last "Answer:" within the last `window` characters, to the end of its line (the DAPO paper's prompt asks for it)."""
    found = ANSWER.findall(text[-window:])
    return found[-1] if found else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost \\boxed{...} and \\fbox{...} of a text as (start, end, content), in order, in one pass.

    A box without braces (\\boxed 5) holds the next word. A box that is never closed is none, but boxes inside it are. Escaped braces
    do not count. Boxes before the last MOST_TEXT characters are not looked for.
    """
    found: list[tuple[int, int, int, int]] = []  # where the box starts and ends, and its content
    opened: list[tuple[int, int]] = []  # for each open brace: where its box starts (-1: not a box), where its content starts
    first = FIRST_BOX.search(text, max(len(text) - MOST_TEXT, 0))
    for match in BOX_TOKEN.finditer(text, first.start()) if first else ():
        token, rest = match.group(), match.group("rest")
        if token == "{":
            opened.append((-1, match.end()))
        elif token == "}" and opened:
            start, inside = opened.pop()
            if start >= 0:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, match.end(), inside, match.start()))
        elif rest == "{":
            opened.append((match.start(), match.end()))
        elif rest:
            found.append((match.start(), match.end(), match.start("rest"), match.end()))
    return [(start, end, text[inside:outside]) for start, end, inside, outside in found]


def last_box(text: str) -> str | None:
    """Content of the last outermost box, or None."""
    found = boxes(text)
    return found[-1][2].strip() if found else None
