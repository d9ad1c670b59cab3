"""Finding the answer in a response. Everything here takes time linear in the length of the text, whatever the text."""

from __future__ import annotations

import re

ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*\n?[ \t]*(?P<rest>\{|[^\s$\\{}]+|)|\\.|[{}]", re.DOTALL)


def last_answer_line(text: str, window: int = 300) -> str | None:
    """What follows the last "Answer:" within the last `window` characters, to the end of its line (the DAPO paper's prompt asks for it)."""
    found = ANSWER.findall(text[-window:])
    return found[-1] if found else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost \\boxed{...} and \\fbox{...} of a text as (start, end, content), in order, in one pass.

    A box without braces (\\boxed 5) holds the next word. A box that is never closed is none, but boxes inside it are. Escaped braces
    do not count.
    """
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int]] = []  # for each open brace: where its box starts (-1: not a box), where its content starts
    for match in BOX_TOKEN.finditer(text):
        token, rest = match.group(), match.group("rest")
        if token == "{":
            opened.append((-1, match.end()))
        elif token == "}" and opened:
            start, inside = opened.pop()
            if start >= 0:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, match.end(), text[inside : match.start()]))
        elif rest == "{":
            opened.append((match.start(), match.end()))
        elif rest:
            found.append((match.start(), match.end(), rest))
    return found


def last_box(text: str) -> str | None:
    """Content of the last outermost box, or None."""
    found = boxes(text)
    return found[-1][2].strip() if found else None
