"""The manifest of a checkpoint: one JSON file that says what the checkpoint is, and by checksums that it is whole."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from rlcli.errors import UserError

SCHEMA = 1  # raised when a reader of the old form would misread the new one
NAME = "manifest.json"

Json = dict[str, Any]


class Damaged(Exception):
    """A checkpoint that is not what its manifest says; the text says where."""


@dataclass(frozen=True)
class FileEntry:
    """One file of the checkpoint."""

    bytes: int
    sha256: str


@dataclass
class Manifest:
    """What a run needs to know of a checkpoint before it opens the rest. Paths are relative: a folder can be moved or copied."""

    kind: str  # dapo or dpo
    step: int  # finished steps
    consumed: int = 0  # prompts (DAPO) or pairs (DPO) taken from the data
    config: Json = field(default_factory=dict)  # resolved
    versions: Json = field(default_factory=dict)  # of msrl and the packages that matter
    layout: Json = field(default_factory=dict)  # tensor, pipeline, data and further parallel sizes
    model: Json = field(default_factory=dict)  # fingerprint of weights' origin and of the tokenizer
    data: Json = field(default_factory=dict)  # fingerprint and cursor
    state: Json = field(default_factory=dict)  # of the loop: counters, generators' seeds, KL controller; what is large lies in files beside
    trackers: Json = field(default_factory=dict)  # run ids, by tracker
    metrics: dict[str, float] = field(default_factory=dict)  # the newest evaluation and step, for `checkpoint.keep_best`
    optimizer: bool = True  # False: weights only, nothing to resume from
    created: str = ""  # local time, for people; nothing is decided by it
    sequence: int = 0  # counts the checkpoints of a folder; the largest is the newest, whatever the clock or the step says
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMA

    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """The file's content; its own checksum included."""
    manifest.created = manifest.created or time.strftime("%Y-%m-%dT%H:%M:%S%z")
    manifest.metrics = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    body = json.loads(json.dumps(asdict(manifest)))  # as it will be read: keys are strings, tuples lists
    body["sha256"] = _digest(body)
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises Damaged where it is not whole, UserError where it is from a newer msrl."""
    path = folder / NAME
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{NAME} cannot be read ({error})") from error
    if not isinstance(body, dict) or not isinstance(body.get("schema"), int):
        raise Damaged(f"{NAME} is not a checkpoint's manifest")
    if body["schema"] > SCHEMA:
        raise UserError(
            f"{path}: written by a newer msrl (manifest schema {body['schema']}, this one reads up to {SCHEMA}); upgrade msrl, or choose an older checkpoint"
        )
    if body.pop("sha256", None) != _digest(body):
        raise Damaged(f"{NAME} differs from its checksum")
    return _build(body)


def _build(body: Json) -> Manifest:
    known = {item.name: item for item in fields(Manifest)}
    missing = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING and name not in body]
    if missing:
        raise Damaged(f"{NAME} lacks {', '.join(missing)}")
    manifest = Manifest(**{name: value for name, value in body.items() if name in known})
    try:
        manifest.files = {_inside(name): FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{NAME} has a malformed list of files ({error})") from error
    return manifest


def _inside(name: str) -> str:
    """A relative path that stays inside the checkpoint; a manifest may come from anyone."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError(f"{name!r} points outside")
    return name


def _digest(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
