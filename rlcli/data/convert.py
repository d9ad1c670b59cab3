"""From a file's rows to the project's: which shape they have, which columns are carried along, and the small edits of a data recipe."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.messages import messages_of, tools_of
from rlcli.data.rows import BadRow, Row
from rlcli.data.settings import PrepareSettings
from rlcli.data.shapes import (
    ANSWERS,
    PROMPT_SHAPES,
    QUESTIONS,
    Raw,
    Shape,
    alpaca_prompt,
    dig,
    first_of,
    prompt_of,
    system_of,
    text,
    used_columns,
)
from rlcli.data.shapes_pairs import PAIR_SHAPES, answer_of, part
from rlcli.errors import UserError

TARGETS = ("prompt", "query", "response", "answer", "system", "history", "chosen", "rejected", "messages", "tools")


def _megatron(raw: Raw) -> Row:
    """A row of the predecessor's prompts: prompt ids, and the answer's ids where it kept them.

    Where `labels` masks the prompt with -100, the row is a whole conversation, and what is not masked is the answer.
    """
    ids, labels = raw["input_ids"], raw.get("labels", [])
    if len(labels) == len(ids) and -100 in labels:
        begin = next((i for i, label in enumerate(labels) if label != -100), len(labels))
        return Row([], ids={"prompt": ids[:begin], "answer": ids[begin:]})
    return Row([], ids={"prompt": ids, "answer": labels})


def _megatron_pair(raw: Raw) -> Row:
    sides = {}
    prompts = []
    for side in ("chosen", "rejected"):
        ids, labels = raw[f"{side}_input_ids"], raw[f"{side}_labels"]
        begin = next((i for i, label in enumerate(labels) if label != -100), len(labels))
        prompts.append(ids[:begin])
        sides[side] = ids[begin:]
    if prompts[0] != prompts[1]:
        raise BadRow("rejected_input_ids", "the same prompt as in chosen_input_ids", prompts[1][:10])
    return Row([], ids={"prompt": prompts[0], **sides})


MEGATRON_SHAPES = [
    Shape("megatron", "prompts", "the predecessor's .bin/.idx: input_ids, and labels where kept", ("input_ids", "labels"), lambda raw: isinstance(raw.get("input_ids"), list), _megatron),
    Shape("megatron_pairs", "pairs", "the predecessor's .bin/.idx: chosen and rejected input_ids and labels", ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"), lambda raw: "chosen_input_ids" in raw and "rejected_labels" in raw, _megatron_pair),
]
SHAPES = [*MEGATRON_SHAPES, *PAIR_SHAPES, *PROMPT_SHAPES]  # in the order in which they are tried


class UnknownColumns(UserError):
    """Rows whose columns must be named. `problem` says why, `naming` how `msrl data prep` is told: `--map ...`."""

    def __init__(self, problem: str, naming: str, more: str = "") -> None:
        super().__init__(f"{problem}: say which is which, for instance {naming}{more}")
        self.problem, self.naming = problem, naming


@dataclass(frozen=True)
class Converter:
    """How the rows of one data set are read: `convert` takes a row and gives a Row, or raises BadRow."""

    shape: str
    kind: str
    convert: Callable[[Raw], Row]
    used: Callable[[Raw], set[str]]


def choose(settings: PrepareSettings, first: Raw, where: Path) -> Converter:
    """The converter for the rows of a file, from its first row. Raises UserError where none fits."""
    chosen = _mapped(settings, first, where) if settings.map else _shaped(settings, first, where)
    if settings.kind not in ("auto", chosen.kind):
        raise UserError(f"{where}: {_seen(first)} make {chosen.kind} (shape {chosen.shape}), not {settings.kind}: give --kind {chosen.kind}, or --map")
    missing = [name for name in settings.keep or [] if not _reaches(first, name)]
    if missing:
        raise UserError(f"{where}: no column {missing[0]!r} to keep; {_seen(first)}")
    return Converter(chosen.shape, chosen.kind, _finished(chosen, settings), chosen.used)


def _seen(first: Raw) -> str:
    return f"the columns {', '.join(first)}"


def _reaches(first: Raw, path: str) -> bool:
    try:
        dig(first, path)
    except KeyError:
        return False
    return True


def _shaped(settings: PrepareSettings, first: Raw, where: Path) -> Converter:
    known = {name: shape for shape in SHAPES for name in (shape.name, *shape.aliases)}
    if settings.shape != "auto":
        if settings.shape not in known:
            near = difflib.get_close_matches(settings.shape, known, 1)
            raise UserError(f"unknown shape {settings.shape!r}{f', did you mean {near[0]}?' if near else ''} Known: {', '.join(s.name for s in SHAPES)}")
        shape: Shape | None = known[settings.shape]
        if shape and not shape.fits(first):
            raise UserError(f"{where}: shape {shape.name} is {shape.help}; the file has {_seen(first)}")
    else:
        wanted = [s for s in SHAPES if settings.kind in ("auto", s.kind)]
        shape = next((s for s in wanted if s.fits(first)), None)
    if shape is None:
        raise UnknownColumns(
            f"{where}: {_seen(first)} fit no known shape of {'rows' if settings.kind == 'auto' else settings.kind}",
            f"--map prompt={next(iter(first), 'COLUMN')} {'chosen=COLUMN rejected=COLUMN' if settings.kind == 'pairs' else 'response=COLUMN'}",
        )
    found = shape
    if found.kind == "prompts":
        _judgeable(found, settings, first, where)
    return Converter(found.name, found.kind, found.convert, lambda raw: used_columns(found, raw))


def _judgeable(shape: Shape, settings: PrepareSettings, first: Raw, where: Path) -> None:
    """Prompts that can have no answer, or that are pairs, are told from the columns, before every row is dropped for it."""
    pair = next((s for s in PAIR_SHAPES if s.fits(first)), None)
    if pair is not None:
        raise UserError(f"{where}: these rows are pairs (shape {pair.name}), not prompts with answers; {_seen(first)}")
    if shape.name == "plain" and settings.need_answer and first_of(first, ANSWERS) is None:
        raise UnknownColumns(
            f"{where}: found no column with answers among {_seen(first)}",
            f"--map prompt={first_of(first, QUESTIONS)} response=COLUMN",
            ", or give need_answer=false for a reward that needs none",
        )


def _mapped(settings: PrepareSettings, first: Raw, where: Path) -> Converter:
    columns = {("response" if target == "answer" else target): path for target, path in settings.map.items() if path}
    for target in settings.map:
        if target not in TARGETS:
            near = difflib.get_close_matches(target, TARGETS, 1)
            raise UserError(f"--map {target}={settings.map[target]}: unknown meaning{f', did you mean {near[0]}?' if near else ''} Known: {', '.join(TARGETS)}")
    for target, path in columns.items():
        if not _reaches(first, path):
            near = difflib.get_close_matches(path, list(first), 1)
            raise UserError(f"{where}: --map {target}={path}: no such column{f', did you mean {near[0]}?' if near else ';'} {_seen(first)}")
    pairs = {"chosen", "rejected"} & set(columns)
    if len(pairs) == 1 or not ({"prompt", "query", "messages"} & set(columns) or pairs):
        raise UserError("--map needs prompt (or messages) for prompts, and chosen and rejected for pairs")
    used = {path.split(".")[0] for path in columns.values()}
    build = _mapped_pair if pairs else _mapped_prompt
    return Converter("mapped", "pairs" if pairs else "prompts", lambda raw: build(_picked(raw, columns)), lambda raw: used)


def _picked(raw: Raw, columns: dict[str, str]) -> Raw:
    picked = {}
    for target, path in columns.items():
        try:
            picked[target] = dig(raw, path)
        except KeyError as error:
            raise BadRow(path, f"a column (mapped to {target})", problem="the row has none") from error
    return picked


def _mapped_messages(raw: Raw) -> list[Any]:
    if "messages" in raw:
        messages = messages_of(raw["messages"], "messages")
        return messages if messages[0]["role"] == "system" else system_of(raw) + messages
    if isinstance(raw.get("prompt"), list):
        return system_of(raw) + prompt_of(raw, "prompt")
    return alpaca_prompt(raw, "prompt", "query", "system", "history")


def _mapped_prompt(raw: Raw) -> Row:
    messages, tools = _mapped_messages(raw), tools_of(raw.get("tools"), "tools")
    answer = text(raw, "response", optional=True)
    if messages[-1]["role"] == "assistant":
        if len(messages) == 1:
            raise BadRow("messages", "a question before the assistant's answer", raw.get("messages"))
        *messages, last = messages
        answer = answer or str(last["content"])
    return Row(messages, answer, tools=tools)


def _mapped_pair(raw: Raw) -> Row:
    chosen, rejected = answer_of(raw, "chosen"), answer_of(raw, "rejected")
    if not {"prompt", "query", "messages"} & set(raw):
        return part(chosen, rejected, ("chosen", "rejected"))
    return Row(_mapped_messages(raw), chosen=chosen, rejected=rejected, tools=tools_of(raw.get("tools"), "tools"))


def _finished(found: Converter, settings: PrepareSettings) -> Callable[[Raw], Row]:
    """The conversion with the recipe's edits and the extra columns."""

    def convert(raw: Raw) -> Row:
        try:
            row = found.convert(raw)
        except KeyError as error:
            raise BadRow(str(error.args[0]), "a value, as in the file's first row", problem="the row has no such column") from error
        row.answer = _answer(row.answer, settings.answer_after)
        if settings.keep is None:
            used = found.used(raw)
            row.extra |= {name: value for name, value in raw.items() if name not in used and value is not None}
        else:
            row.extra = {name: dig(raw, name) for name in settings.keep if _reaches(raw, name)}
        if row.ids is None and (settings.system or settings.prefix or settings.suffix):
            _edit_prompt(row, settings)
        return row

    return convert


def _answer(answer: str, after: str) -> str:
    if after and answer.strip():
        _, found, tail = answer.rpartition(after)
        if not found:
            raise BadRow("answer", f"a text with {after!r}, after which the answer stands", answer[-60:])
        answer = tail
    return answer.strip()


def _edit_prompt(row: Row, settings: PrepareSettings) -> None:
    if settings.system and row.prompt[0]["role"] != "system":
        row.prompt.insert(0, {"role": "system", "content": settings.system})
    last = next((message for message in reversed(row.prompt) if message["role"] == "user"), None)
    if last is not None:
        last["content"] = settings.prefix + last["content"] + settings.suffix
