"""A row on its way from a file to token ids, and what is said when it is bad."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role, content; tool_calls, name, reasoning_content where given; "train": False where its loss is off

_SHOWN = 60  # characters of a bad value that are shown


@dataclass(slots=True)
class Row:
    """One row in the project's own shape, whatever file it came from.

    kind "prompts" fills `answer`; kind "pairs" fills `chosen` and `rejected`, the messages that follow the common prompt.
    """

    prompt: list[Message]
    answer: str = ""
    chosen: list[Message] = field(default_factory=list)
    rejected: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    ids: dict[str, list[int]] | None = None  # rows that come tokenised: prompt, answer or chosen and rejected
    extra: dict[str, Any] = field(default_factory=dict)
    file: int = 0  # number of the source file
    number: int = 0  # row (line) in the file, from 1


class BadRow(Exception):
    """A row that cannot be used: which column, what was expected, what stood there."""

    def __init__(self, column: str, expected: str, value: Any = None, problem: str | None = None) -> None:
        self.column = column
        self.expected = expected
        self.value = problem if problem is not None else f"found {brief(value)}"
        super().__init__(f'column "{column}": expected {expected}, {self.value}' if column else f"expected {expected}, {self.value}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (BadRow, (self.column, self.expected, None, self.value))


def brief(value: Any) -> str:
    """A value in a few characters, with its type where the text alone would not tell."""
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    if isinstance(value, str):
        return f"the text {text!r}"
    names = {bool: "the truth value", int: "the number", float: "the number", list: "the list", dict: "the object"}
    return f"{names.get(type(value), type(value).__name__)} {text}"


def text_of(messages: list[Message]) -> str:
    """What a conversation says, for comparing rows: roles, contents and tool calls, in order."""
    if len(messages) == 1 and "tool_calls" not in messages[0]:
        return f"{messages[0]['role']}\x1f{messages[0]['content']}"
    parts = []
    for message in messages:
        calls = json.dumps(message["tool_calls"], sort_keys=True, default=str) if message.get("tool_calls") else ""
        parts.append(f"{message['role']}\x1f{message['content']}{calls}")
    return "\x1e".join(parts)
