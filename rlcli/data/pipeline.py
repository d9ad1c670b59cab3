"""The way of the rows through a preparation: read, convert, clean, encode, write; every row either appears or is counted."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlcli.data.clean import STEPS, Duplicates, HeldOut, answer_text, in_validation, prompt_text, question
from rlcli.data.convert import Converter, choose
from rlcli.data.lengths import Lengths
from rlcli.data.manifest import Manifest, write_manifest
from rlcli.data.rows import BadRow, Row
from rlcli.data.settings import PrepareSettings
from rlcli.data.shards import ShardWriter, record
from rlcli.data.sources import Meter, Source, find_sources, read_rows
from rlcli.data.tokens import Encoded, Encoder
from rlcli.data.workers import CHUNK, EncodePool
from rlcli.errors import UserError

Progress = Callable[[int, int, int], None]  # rows read, bytes read, bytes in all


@dataclass
class Pipeline:
    """One preparation under way: reads, cleans, encodes and writes into `folder`; counts every row at the step that decides on it."""

    settings: PrepareSettings
    sources: list[Source]
    converters: list[Converter]
    encoder: Encoder
    manifest: Manifest
    folder: Path
    progress: Progress | None
    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[tuple[int, int, str, str, str]] = field(default_factory=list)  # file, row, column, expected, found
    longest_prompt: int = 0  # tokens, of the rows that were left out too
    longest: int = 0  # of prompt and longer answer together
    boundary: int = 0  # rows whose prompt and answer the tokenizer would merge
    special: int = 0  # rows whose own text holds special tokens
    held_out: int = 0  # questions that rows were compared with
    encoded: int = 0
    busy_s: float = 0.0

    def run(self) -> Manifest | None:
        """Everything between the first row and the written manifests; returns that of the validation part, if any."""
        settings, kind = self.settings, self.manifest.kind
        held = self._held_out()
        duplicates = Duplicates(kind)
        drop = self._conflicting() if settings.conflicts == "drop" and kind == "prompts" else set()
        parts = {"train": Part(self.folder, kind, settings.shard_rows)}
        if settings.validation > 0:
            parts["validation"] = Part(self.folder / "validation", kind, settings.shard_rows)
        with EncodePool(self.encoder, kind, settings.workers) as pool:
            for rows, results in pool.map(_chunks(self._clean(duplicates, held, drop))):
                for row, result in zip(rows, results, strict=True):
                    self._keep(row, result, parts)
            self.busy_s = pool.busy_s
        return self._finish(parts, duplicates)

    # -- reading and cleaning -----------------------------------------------------------------------------------------------

    def _rows(self, count: bool = True, only: Container[tuple[int, int]] | None = None) -> Iterator[Row]:
        """Rows of all files in order, or `only` those at some places; bad ones stop the preparation or are noted (where `count`)."""
        total, before, read = sum(source.bytes for source in self.sources), 0, 0
        for number, (source, converter) in enumerate(zip(self.sources, self.converters, strict=True)):
            meter = Meter()
            for place, raw in read_rows(source, meter):
                if self.settings.limit and read == self.settings.limit:
                    return
                read += 1
                if only is not None and (number, place) not in only:
                    continue
                if count and self.progress and read % CHUNK == 0:
                    self.progress(read, before + min(meter.bytes, source.bytes), total)
                self.counts["read"] += count
                row = self._converted(converter, raw)
                if isinstance(row, Row):
                    row.file, row.number = number, place
                    yield row
                elif count:
                    self._bad(number, place, row, "bad")
            before += source.bytes
        if count and self.progress:
            self.progress(read, total, total)

    @staticmethod
    def _converted(converter: Converter, raw: Any) -> Row | BadRow:
        if isinstance(raw, BadRow):
            return raw
        try:
            row = converter.convert(raw)
            f"{prompt_text(row)}{answer_text(row)}".encode()
        except BadRow as bad:
            return bad
        except UnicodeEncodeError:
            return BadRow("", "text in Unicode", problem="found half a character (a lone surrogate)")
        return row

    def _bad(self, file: int, place: int, bad: BadRow, step: str) -> None:
        if self.settings.on_bad_row == "stop":
            source = self.sources[file]
            unit = "line" if source.format in ("jsonl", "csv", "tsv") else "row"
            raise UserError(f"{source.path}, {unit} {place}: {bad}; mend it, or leave such rows out with --on-bad-row skip")
        self.counts[step] += 1
        self.skipped.append((file, place, bad.column, bad.expected, bad.value))

    def _clean(self, duplicates: Duplicates, held: HeldOut | None, drop: set[bytes]) -> Iterator[Row]:
        for row in self._rows():
            step = self._fault(row)
            if step is None:
                repeated = duplicates.see(row)
                step = repeated if self.settings.deduplicate else None
            if step is None and drop and duplicates.key(row) in drop:
                step = "conflict"
            if step is None and held is not None:
                step = held.find(question(row))
            if step is None:
                yield row
            else:
                self.counts[step] += 1

    def _fault(self, row: Row) -> str | None:
        if row.ids is not None:
            ids = row.ids
            empty = not (ids["chosen"] and ids["rejected"]) if "chosen" in ids else self.settings.need_answer and not ids["answer"]
            return "empty_prompt" if not ids["prompt"] else "empty_answer" if empty else "same_answers" if _same(ids) else None
        if not any(str(m["content"]).strip() or m.get("tool_calls") for m in row.prompt if m["role"] != "system"):
            return "empty_prompt"
        if self.manifest.kind == "prompts":
            return "empty_answer" if self.settings.need_answer and not row.answer.strip() else None
        lasts = [side[-1] for side in (row.chosen, row.rejected)]
        if not all(str(m["content"]).strip() or m.get("tool_calls") for m in lasts):
            return "empty_answer"
        chosen, rejected = ([(m["role"], str(m["content"]).strip(), m.get("tool_calls")) for m in side] for side in (row.chosen, row.rejected))
        return "same_answers" if chosen == rejected else None

    def _held_out(self) -> HeldOut | None:
        if not self.settings.exclude:
            return None
        if self.manifest.shape.startswith("megatron"):
            raise UserError("rows that come tokenised cannot be compared with --exclude files: prepare their sources instead")
        questions = []
        plain = PrepareSettings(need_answer=False)  # pairs are held out by their questions too
        for source in find_sources(self.settings.exclude):
            converter: Converter | None = None
            for place, raw in read_rows(source):
                if isinstance(raw, BadRow):
                    raise UserError(f"{source.path}, row {place}: {raw}")
                converter = converter or choose(plain, raw, source.path)
                row = self._converted(converter, raw)
                if isinstance(row, BadRow):
                    raise UserError(f"{source.path}, row {place}: {row}")
                questions.append(question(row))
        self.held_out = len(questions)
        return HeldOut.of(questions, self.settings.exclude_ngram, self.settings.exclude_share)

    def _conflicting(self) -> set[bytes]:
        """Prompts that come with different answers, from a reading of their own."""
        seen = Duplicates(self.manifest.kind)
        for row in self._rows(count=False):
            if self._fault(row) is None:
                seen.see(row)
        return set(seen.conflicts)

    # -- writing ------------------------------------------------------------------------------------------------------------

    def _keep(self, row: Row, result: Encoded | BadRow, parts: dict[str, Part]) -> None:
        self.encoded += 1
        if isinstance(result, BadRow):
            self._bad(row.file, row.number, result, "not_rendered")
            return
        self.longest_prompt = max(self.longest_prompt, len(result.prompt))
        self.longest = max(self.longest, _whole(result))
        step = self._too_long(result)
        if step is not None:
            self.counts[step] += 1
            return
        self.boundary += result.boundary
        self.special += result.special
        apart = in_validation(row, self.settings.validation, self.settings.seed)
        self.counts["validation" if apart else "kept"] += 1
        parts["validation" if apart else "train"].add(record(row, result, self.manifest.kind))

    def _too_long(self, result: Encoded) -> str | None:
        if 0 < self.settings.max_prompt_tokens < len(result.prompt):
            return "long_prompt"
        return "long" if 0 < self.settings.max_tokens < _whole(result) else None

    def _finish(self, parts: dict[str, Part], duplicates: Duplicates) -> Manifest | None:
        manifest = self.manifest
        manifest.counts = {name: self.counts[name] for name in ("read", *STEPS, "kept", "validation")}
        manifest.notes = {
            "distinct_prompts": duplicates.prompts,
            "distinct_normal": duplicates.normal_prompts,
            "conflicting_prompts": len(duplicates.conflicts),
            "longest_prompt": self.longest_prompt,
            "longest": self.longest,
            "boundary": self.boundary,
            "special": self.special,
            "held_out": self.held_out,
        }
        self._write_skipped()
        if duplicates.conflicts:
            self._write_conflicts(duplicates.conflicts)
        validation = None
        if "validation" in parts:
            validation = dataclasses.replace(manifest, part="validation", counts=dict(manifest.counts), notes={})
            parts["validation"].finish(validation)
        parts["train"].finish(manifest)
        if manifest.rows == 0:
            raise UserError(f"no row is left for training: {_why(manifest)}")
        return validation

    def _write_skipped(self) -> None:
        if not self.skipped:
            return
        with open(self.folder / "skipped.jsonl", "w", encoding="utf-8", errors="backslashreplace") as file:
            for number, place, column, expected, found in sorted(self.skipped):
                item = {"file": str(self.sources[number].path), "row": place, "column": column, "expected": expected, "problem": found}
                file.write(json.dumps(item, ensure_ascii=False) + "\n")

    def _write_conflicts(self, conflicts: dict[bytes, list[tuple[int, int]]]) -> None:
        """conflicts.jsonl: each prompt with its different answers and where they stand."""
        wanted = {place: number for number, places in enumerate(conflicts.values()) for place in places}
        found: list[list[tuple[tuple[int, int], Row]]] = [[] for _ in conflicts]
        for row in self._rows(count=False, only=wanted):
            found[wanted[row.file, row.number]].append(((row.file, row.number), row))
        with open(self.folder / "conflicts.jsonl", "w", encoding="utf-8") as file:
            for rows in found:
                places = [f"{self.sources[place[0]].path}:{place[1]}" for place, _ in rows]
                item = {"question": question(rows[0][1]), "answers": [row.answer for _, row in rows], "rows": places}
                file.write(json.dumps(item, ensure_ascii=False) + "\n")


class Part:
    """Training or validation rows on their way to disk."""

    def __init__(self, folder: Path, kind: str, shard_rows: int) -> None:
        self.folder = folder
        self._writer = ShardWriter(folder, kind, shard_rows)
        self._lengths = Lengths(kind)

    def add(self, item: dict[str, Any]) -> None:
        self._writer.add(item)
        self._lengths.add(item)

    def finish(self, manifest: Manifest) -> None:
        self._writer.finish()
        manifest.rows, manifest.files = self._writer.rows, self._writer.files
        manifest.lengths = self._lengths.summary()
        write_manifest(self.folder, manifest)


def _whole(result: Encoded) -> int:
    return len(result.prompt) + max((len(answer) for answer in result.answers), default=0)


def _same(ids: dict[str, list[int]]) -> bool:
    return "chosen" in ids and ids["chosen"] == ids["rejected"]


def _why(manifest: Manifest) -> str:
    dropped = [f"{count} {STEPS[name]}" for name, count in manifest.counts.items() if count and name in STEPS]
    return f"{manifest.counts['read']} read, {', '.join(dropped) or 'none dropped'}"


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
