"""manifest.json of a prepared data set: what it was made from and how, and what came out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.errors import UserError

SCHEMA = 1  # raised whenever the files' meaning changes
NAME = "manifest.json"


@dataclass
class Manifest:
    """Everything that decides a data set's rows, and their counts. The same inputs give the same manifest, to the byte."""

    schema: int
    kind: str  # prompts or pairs
    shape: str
    settings: dict[str, Any]  # those that change the rows
    sources: list[dict[str, Any]]  # path, bytes, sha256
    excluded: list[dict[str, Any]]  # the held-out files, likewise
    tokenizer: dict[str, Any]  # tokens.tokenizer_fingerprint, and the folder it came from
    template: dict[str, Any]  # name, sha256, text
    part: str = "train"  # or validation
    counts: dict[str, int] = field(default_factory=dict)  # read, each step that dropped rows, kept, validation
    notes: dict[str, Any] = field(default_factory=dict)  # conflicts, boundary, longest ...
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)  # tokens: min, mean, p50, p90, p99, max
    rows: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)  # shards: file, rows, bytes, sha256

    @property
    def fingerprint(self) -> str:
        """32 hex digits that stand for these very rows: the shards' hashes."""
        text = json.dumps([self.schema, self.kind, self.part, [file["sha256"] for file in self.files]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def origin(self) -> dict[str, Any]:
        """What the rows follow from, by name: two data sets with equal origins have equal rows."""
        flat: dict[str, Any] = {"schema version": self.schema, "part": self.part}
        flat |= {f"setting {key}": value for key, value in self.settings.items() if key not in ("input", "exclude", "tokenizer")}
        flat |= {"sources": [source["sha256"] for source in self.sources], "held-out files": [held["sha256"] for held in self.excluded]}
        flat["tokenizer"] = {key: value for key, value in self.tokenizer.items() if key != "folder"}
        flat["template"] = self.template["sha256"]
        return flat


def changes(old: Manifest, new: Manifest) -> list[str]:
    """What differs between two origins, one short line each."""
    before, after = old.origin(), new.origin()
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        named = key == "template" and before.get("setting template") != after.get("setting template")  # said already, by name
        if before.get(key) != after.get(key) and not named:
            shown = key in ("sources", "held-out files", "tokenizer", "template")
            lines.append(f"{key} changed" if shown else f"{key.removeprefix('setting ')}: {_said(before.get(key))} -> {_said(after.get(key))}")
    return lines


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False, sort_keys=True)
    (folder / NAME).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def is_prepared(folder: Path) -> bool:
    """Whether a folder is a prepared data set."""
    return (folder / NAME).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError where the folder is no data set, the manifest is damaged, or it is of another version."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: no data set made by `msrl data prep` (it has no {NAME})")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in dataclasses.fields(Manifest)}
        if data["schema"] != SCHEMA:
            raise UserError(f"{folder}: made by another version of msrl (data schema {data['schema']}, this one reads {SCHEMA}): prepare it anew")
        return Manifest(**{key: value for key, value in data.items() if key in known})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())[:100]}): prepare the data anew") from error
