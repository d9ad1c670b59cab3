"""Shapes of preference pairs: a prompt with a chosen and a rejected answer, or two conversations that part at some turn."""

from __future__ import annotations

import re
from typing import Any

from rlcli.data.messages import message_of, messages_of, tools_of
from rlcli.data.rows import BadRow, Message, Row, text_of
from rlcli.data.shapes import CONVERSATIONS, Raw, Shape, alpaca_prompt, assistant, first_of, prompt_of, system_of, text, user

_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ANSWER = "an answer: a text, a message of the assistant, or a list of messages"


def answer_of(raw: Raw, column: str) -> list[Message]:
    """The messages of one answer: a text, one message, or a list that ends with the assistant's turn."""
    value = raw.get(column)
    if isinstance(value, str):
        return [assistant(value)]
    if isinstance(value, dict):
        return _ends_with_assistant([message_of(value, column)], column)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return _ends_with_assistant(messages_of(value, column), column)
    raise BadRow(column, _ANSWER, value)


def _ends_with_assistant(messages: list[Message], column: str) -> list[Message]:
    if messages[-1]["role"] != "assistant":
        raise BadRow(column, "the assistant's turn at the end", messages[-1])
    return messages


def part(chosen: list[Message], rejected: list[Message], columns: tuple[str, str], tools: list[Any] | None = None) -> Row:
    """Two whole conversations as their common prompt and what follows it on each side.

    The prompt is the longest common beginning after which both sides go on with the assistant's turn.
    """
    common = 0
    for mine, theirs in zip(chosen, rejected, strict=False):
        if text_of([mine]) != text_of([theirs]):
            break
        common += 1
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    while common > 0 and not (chosen[common]["role"] == rejected[common]["role"] == "assistant"):
        common -= 1
    if common == 0 or chosen[common - 1]["role"] == "assistant":
        raise BadRow(columns[1], f"the same question as in {columns[0]} before the answers part", rejected[0]["content"])
    return Row(chosen[:common], chosen=chosen[common:], rejected=rejected[common:], tools=tools)


def _two_conversations(raw: Raw) -> Row:
    chosen, rejected = (_ends_with_assistant(messages_of(raw[name], name), name) for name in ("chosen_messages", "rejected_messages"))
    return part(chosen, rejected, ("chosen_messages", "rejected_messages"), tools_of(raw.get("tools"), "tools"))


def _ranking(raw: Raw) -> Row:
    column = first_of(raw, CONVERSATIONS) or "conversations"
    prompt = messages_of(raw[column], column)
    if prompt[0]["role"] != "system":
        prompt = system_of(raw) + prompt
    if prompt[-1]["role"] == "assistant":
        raise BadRow(column, "a last turn that is not the assistant's; the answers stand in chosen and rejected", raw[column][-1])
    return _with_answers(prompt, raw, tools_of(raw.get("tools"), "tools"))


def _with_answers(prompt: list[Message], raw: Raw, tools: list[Any] | None = None) -> Row:
    chosen, rejected = answer_of(raw, "chosen"), answer_of(raw, "rejected")
    for answer, column in ((chosen, "chosen"), (rejected, "rejected")):
        if len(answer) > len(prompt) and text_of(answer[: len(prompt)]) == text_of(prompt):
            del answer[: len(prompt)]  # the whole conversation stands in the answer's column
        if answer[0]["role"] != "assistant":
            raise BadRow(column, "an answer that begins with the assistant's turn", raw[column])
    return Row(prompt, chosen=chosen, rejected=rejected, tools=tools)


def _alpaca_pair(raw: Raw) -> Row:
    return _with_answers(alpaca_prompt(raw), raw)


def _alpaca_two_outputs(raw: Raw) -> Row:
    outputs = raw["output"]
    if not (isinstance(outputs, list) and len(outputs) == 2):
        raise BadRow("output", "two answers, the better one first", outputs)
    return _with_answers(alpaca_prompt(raw), {"chosen": outputs[0], "rejected": outputs[1]})


def _orca(raw: Raw) -> Row:
    return _with_answers([*system_of(raw), user(text(raw, "question"))], raw)


def _explicit(raw: Raw) -> Row:
    prompt = prompt_of(raw, "prompt")
    if prompt[0]["role"] != "system":
        prompt = system_of(raw) + prompt
    return _with_answers(prompt, raw, tools_of(raw.get("tools"), "tools"))


def _implicit(raw: Raw) -> Row:
    chosen, rejected = raw["chosen"], raw["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        sides = [_dialogue(chosen), _dialogue(rejected)]
        if all(sides):
            ended = [_ends_with_assistant(side, name) for side, name in zip(sides, ("chosen", "rejected"), strict=True)]
            return part(ended[0], ended[1], ("chosen", "rejected"))
        return _common_text(chosen, rejected)
    return part(answer_of(raw, "chosen"), answer_of(raw, "rejected"), ("chosen", "rejected"), tools_of(raw.get("tools"), "tools"))


def _dialogue(value: str) -> list[Message]:
    """Turns of a text in Anthropic's form (blank line, "Human:" or "Assistant:"); empty where it is not in that form."""
    parts = _HH_TURN.split(value)
    if len(parts) < 5 or parts[0].strip():
        return []
    return [(user if who == "Human" else assistant)(said.strip()) for who, said in zip(parts[1::2], parts[2::2], strict=True)]


def _common_text(chosen: str, rejected: str) -> Row:
    """Two texts whose common beginning is the prompt, up to the last blank in it, so that no word is cut."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    head = chosen[:same]
    cut = max(head.rfind(" "), head.rfind("\n")) + 1
    if not head[:cut].strip():
        raise BadRow("rejected", "a text that begins with the same prompt as chosen", rejected)
    return Row([user(chosen[:cut].rstrip())], chosen=[assistant(chosen[cut:])], rejected=[assistant(rejected[cut:])])


def _pair(raw: Raw) -> bool:
    return "chosen" in raw and "rejected" in raw


_C = ("chosen", "rejected")

PAIR_SHAPES = [
    Shape("two_conversations", "pairs", "chosen_messages and rejected_messages, each a whole conversation", ("chosen_messages", "rejected_messages", "tools"), lambda raw: "chosen_messages" in raw and "rejected_messages" in raw, _two_conversations),
    Shape("ranking", "pairs", "conversations or messages, with chosen and rejected (LLaMA-Factory)", (*CONVERSATIONS, *_C, "system", "tools"), lambda raw: _pair(raw) and first_of(raw, CONVERSATIONS) is not None, _ranking, ("sharegpt_pairs",)),
    Shape("alpaca_pairs", "pairs", "instruction, input, chosen, rejected; system and history where given", ("instruction", "input", *_C, "system", "history"), lambda raw: _pair(raw) and "instruction" in raw, _alpaca_pair, ("AlpacaStylePairwiseHandler",)),
    Shape("alpaca_outputs", "pairs", "instruction, input, output with two answers, the better one first", ("instruction", "input", "output", "system", "history"), lambda raw: "instruction" in raw and isinstance(raw.get("output"), list), _alpaca_two_outputs),
    Shape("orca", "pairs", "system, question, chosen, rejected", ("system", "question", *_C), lambda raw: _pair(raw) and "question" in raw, _orca),
    Shape("explicit", "pairs", "prompt, chosen, rejected: texts or messages (trl)", ("prompt", "system", "tools", *_C), lambda raw: _pair(raw) and "prompt" in raw, _explicit, ("trl",)),
    Shape("implicit", "pairs", "chosen and rejected with the prompt inside both: texts or messages (trl, hh-rlhf)", (*_C, "tools"), _pair, _implicit, ("hh",)),
]
