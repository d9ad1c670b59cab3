"""The settings of `msrl data prep`. Defaults stand here and nowhere else; a data recipe states only what differs."""

# ruff: noqa: RUF009 - `setting` makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from rlcli.config.schema import setting


@dataclass
class PrepareSettings:
    """What rows are read, how they are cleaned and rendered, and where the data set goes."""

    input: list[str] = setting([], "files, folders or globs: parquet, arrow, feather, jsonl, json, csv, tsv, these with .gz or .zst, or a Megatron .bin/.idx set")
    out: str = setting("", "folder of the prepared data set")
    tokenizer: str = setting("", "folder of the model or its tokenizer")
    kind: str = setting("auto", "prompts (with answers to judge by), or pairs (chosen and rejected); auto: pairs where the rows have both", choices=("auto", "prompts", "pairs"))
    shape: str = setting("auto", "form of the rows by name; auto: found from the first row and shown")
    map: dict[str, str] = setting({}, "columns by meaning, for instance prompt=problem response=answer; dots reach into objects; a number picks from a list")
    keep: Optional[list[str]] = setting(None, "columns carried along for the rewards; none: all that are not used otherwise")
    answer_after: str = setting("", "keep of each answer only what follows the last occurrence of this text")
    system: str = setting("", "system message for rows that have none")
    prefix: str = setting("", "text put before the last user message")
    suffix: str = setting("", "text put after the last user message")
    template: Optional[str] = setting(None, "chat template: a file or a built-in name; none: the tokenizer's own")
    enable_thinking: Optional[bool] = setting(None, "passed to chat templates that know it; none: the template's own default")
    max_prompt_tokens: int = setting(0, "longest prompt in tokens, inclusive; longer ones are counted and left out; 0: no limit", least=0)
    max_tokens: int = setting(0, "longest prompt and answer together (pairs), inclusive; 0: no limit", least=0)
    deduplicate: bool = setting(True, "drop rows that repeat an earlier one, also where only whitespace differs")
    conflicts: str = setting("keep", "one prompt with different answers: keep all of them as rows of their own, or drop all; reported either way", choices=("keep", "drop"))
    need_answer: bool = setting(True, "drop prompts without an answer; off: a reward that needs none")
    exclude: list[str] = setting([], "held-out files: training rows that equal or nearly equal one of theirs are dropped")
    exclude_ngram: int = setting(13, "words in a row that count as overlap with a held-out row", least=3)
    exclude_share: float = setting(0.5, "share of a row's n-grams, or of the held-out row's, that makes them nearly equal", above=0.0, most=1.0)
    validation: float = setting(0.0, "share of the rows set apart in OUT/validation, chosen by a hash of the prompt", least=0.0, most=0.9)
    seed: int = setting(1, "seed of the validation share", least=0)
    limit: int = setting(0, "read only the first so many rows; 0: all", least=0)
    on_bad_row: str = setting("stop", "a row that cannot be read: stop, or skip it and list it in skipped.jsonl", choices=("stop", "skip"))
    shard_rows: int = setting(100_000, "rows a Parquet file", least=1)
    workers: int = setting(1, "processes that render and tokenise; the result is the same for every number", least=1)
    log_interval: int = setting(0, "without a terminal, print progress every so many rows; 0: never", least=0)
    overwrite: bool = setting(False, "prepare anew where OUT holds a data set made otherwise")


HOW_IT_RUNS = ("out", "workers", "log_interval", "overwrite")  # settings that do not change the rows
