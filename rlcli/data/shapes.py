"""The shapes that rows come in, found from the first row or named, and how each becomes a Row.

A shape is a function from a row (column -> value) to a Row; it raises BadRow with the column, what was expected and what stood there.
Pairs stand in shapes_pairs.py, this file has the prompts and what both share.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlcli.data.messages import messages_of, tools_of
from rlcli.data.rows import BadRow, Message, Row

Raw = dict[str, Any]

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "text")
ANSWERS = ("answer", "ground_truth", "label", "final_answer", "expected_answer", "solution", "response", "output", "target", "completion")
CONVERSATIONS = ("messages", "conversations", "conversation")


@dataclass(frozen=True)
class Shape:
    """A form of rows: `columns` are those it uses, `fits` tells from a row's columns, `convert` makes the Row."""

    name: str
    kind: str  # prompts or pairs
    help: str
    columns: tuple[str, ...]
    fits: Callable[[Raw], bool]
    convert: Callable[[Raw], Row]
    aliases: tuple[str, ...] = field(default=())


def first_of(raw: Raw, names: tuple[str, ...]) -> str | None:
    """The first of `names` that is a column of the row."""
    return next((name for name in names if name in raw), None)


def text(raw: Raw, column: str, optional: bool = False) -> str:
    """A column's text; numbers become their text. Raises BadRow for lists, objects and, unless optional, nothing."""
    value = raw.get(column)
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRow(column, "a text", value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system_of(raw: Raw, column: str = "system") -> list[Message]:
    """The system message of a row, or none where it has no text."""
    content = text(raw, column, optional=True)
    return [{"role": "system", "content": content}] if content.strip() else []


def prompt_of(raw: Raw, column: str) -> list[Message]:
    """A prompt column: a text, or messages that end with the user's (or a tool's) turn."""
    value = raw.get(column)
    if isinstance(value, list):
        messages = messages_of(value, column)
        if messages[-1]["role"] == "assistant":
            raise BadRow(column, "messages whose last one is not the assistant's", value[-1])
        return messages
    if value is not None and not isinstance(value, str):
        raise BadRow(column, "a text or a list of messages", value)
    return [user(text(raw, column))]


def history_of(raw: Raw, column: str = "history") -> list[Message]:
    """Earlier turns as pairs of texts, [[question, answer], ...]."""
    messages: list[Message] = []
    for turn in raw.get(column) or []:
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise BadRow(column, "pairs of texts like [[question, answer], ...]", turn)
        messages += [user(turn[0]), assistant(turn[1])]
    return messages


def alpaca_prompt(raw: Raw, prompt: str = "instruction", query: str = "input", system: str = "system", history: str = "history") -> list[Message]:
    """System, history and instruction; instruction and input are joined by a newline."""
    parts = [part for part in (text(raw, prompt, optional=True), text(raw, query, optional=True)) if part]
    return [*system_of(raw, system), *history_of(raw, history), user("\n".join(parts))]


def _alpaca(raw: Raw) -> Row:
    return Row(alpaca_prompt(raw), text(raw, first_of(raw, ("output", "response", "answer")) or "output", optional=True))


def _conversation(raw: Raw) -> Row:
    column = first_of(raw, CONVERSATIONS) or "messages"
    messages = messages_of(raw[column], column)
    if messages[0]["role"] != "system":
        messages = system_of(raw) + messages
    tools = tools_of(raw.get("tools"), "tools")
    if messages[-1]["role"] != "assistant":
        given = first_of(raw, ANSWERS)
        return Row(messages, text(raw, given, optional=True) if given else "", tools=tools)
    if len(messages) == 1:
        raise BadRow(column, "a question before the assistant's answer", raw[column])
    return Row(messages[:-1], str(messages[-1]["content"]), tools=tools)


def _verl(raw: Raw) -> Row:
    reward = raw["reward_model"]
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise BadRow("reward_model", "an object with ground_truth", reward)
    truth = text({"reward_model.ground_truth": reward["ground_truth"]}, "reward_model.ground_truth", optional=True)
    rest = {key: value for key, value in reward.items() if key != "ground_truth"}
    return Row(prompt_of(raw, "prompt"), truth, extra={"reward_model": rest} if rest else {})


def _slime(raw: Raw) -> Row:
    return Row(prompt_of(raw, "prompt"), text(raw, "label", optional=True), tools=tools_of(raw.get("tools"), "tools"))


def _plain(raw: Raw) -> Row:
    question, answer = first_of(raw, QUESTIONS) or "prompt", first_of(raw, ANSWERS)
    return Row(system_of(raw) + prompt_of(raw, question), text(raw, answer, optional=True) if answer else "")


def _plain_columns(raw: Raw) -> tuple[str, ...]:
    return tuple(name for name in (first_of(raw, QUESTIONS), first_of(raw, ANSWERS)) if name)


def _has(*names: str) -> Callable[[Raw], bool]:
    return lambda raw: all(name in raw for name in names)


PROMPT_SHAPES = [
    Shape("verl", "prompts", "DAPO and verl: prompt (messages), reward_model.ground_truth", ("prompt", "reward_model"), _has("prompt", "reward_model"), _verl, ("dapo", "Math17kAlpacaStyleInstructionHandler")),
    Shape("slime", "prompts", "slime: prompt (text or messages), label", ("prompt", "label", "tools"), _has("prompt", "label"), _slime),
    Shape("messages", "prompts", "messages or conversations (role/content or from/value); the last answer is what is judged by", (*CONVERSATIONS, "system", "tools"), lambda raw: first_of(raw, CONVERSATIONS) is not None, _conversation, ("sharegpt", "openai")),
    Shape("alpaca", "prompts", "instruction, input, output; system and history where given", ("instruction", "input", "output", "system", "history"), lambda raw: "instruction" in raw and ("output" in raw or "input" in raw), _alpaca, ("AlpacaStyleInstructionHandler", "R1AlpacaStyleInstructionHandler")),
    Shape("plain", "prompts", f"a question ({', '.join(QUESTIONS)}) and an answer ({', '.join(ANSWERS)})", (), lambda raw: first_of(raw, QUESTIONS) is not None, _plain),
]


def used_columns(shape: Shape, raw: Raw) -> set[str]:
    """Columns of this row that the shape takes its texts from; the others are extras."""
    if shape.name == "plain":
        return {*_plain_columns(raw), "system"}
    if shape.name in ("messages", "alpaca"):
        answer = first_of(raw, ("output", "response", "answer") if shape.name == "alpaca" else ANSWERS)
        return {*shape.columns, *([answer] if answer else [])}
    return set(shape.columns)


_STEP = re.compile(r"\.")


def dig(raw: Raw, path: str) -> Any:
    """The value at a dotted path; numbers pick from lists (`reward_model.ground_truth`, `prompt.0.content`). Raises KeyError."""
    if path in raw:
        return raw[path]
    value: Any = raw
    for step in _STEP.split(path):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise KeyError(path) from error
    return value
