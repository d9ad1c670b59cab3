"""`msrl data prep`, and a run's data: rows from any file to a checked, cleaned, tokenised data set on disk.

A run names either a prepared folder, which is checked to fit its model, or files, which are prepared on the way into a cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlcli.config.settings import ValueFault, check_range, settings_of
from rlcli.data.convert import Converter, UnknownColumns, choose
from rlcli.data.manifest import SCHEMA, Manifest, changes, is_prepared, read_manifest
from rlcli.data.pipeline import Pipeline, Progress
from rlcli.data.rows import BadRow
from rlcli.data.settings import HOW_IT_RUNS, PrepareSettings
from rlcli.data.sources import Source, find_sources, read_rows
from rlcli.data.staging import staged_folder
from rlcli.data.store import PairSet, PromptSet
from rlcli.data.templates import OWN, find_template
from rlcli.data.tokens import Encoder, load_tokenizer, tokenizer_fingerprint
from rlcli.errors import UserError


@dataclass
class PrepareReport:
    """What a preparation did. `unchanged`: the folder held this very data set already, and nothing was done."""

    out: Path
    manifest: Manifest
    validation: Manifest | None
    unchanged: bool = False
    seconds: float = 0.0
    busy_s: float = 0.0  # of all workers together, encoding
    encoded: int = 0  # rows that were rendered and tokenised
    workers: int = 1


def prepare(settings: PrepareSettings, progress: Progress | None = None) -> PrepareReport:
    """Read, clean, render, tokenise and write. The folder `settings.out` appears whole or not at all.

    Raises UserError for wrong settings, bad files and (unless they are to be skipped) bad rows.
    """
    begin = time.perf_counter()
    _check(settings)
    sources = find_sources(settings.input)
    encoder = Encoder(settings.tokenizer, settings.template, settings.enable_thinking)
    converters = _converters(settings, sources)
    manifest = _origin(settings, sources, converters, encoder)
    out = Path(settings.out).expanduser()
    done = _already(out, manifest, settings)
    if done is not None:
        return done
    with staged_folder(out) as folder:
        work = Pipeline(settings, sources, converters, encoder, manifest, folder, progress)
        validation = work.run()
    return PrepareReport(
        out, manifest, validation, seconds=time.perf_counter() - begin, busy_s=work.busy_s, encoded=work.encoded, workers=settings.workers
    )


def _check(settings: PrepareSettings) -> None:
    for key, known in settings_of(PrepareSettings).items():
        try:
            if (value := getattr(settings, key)) is not None:
                check_range(known, value)
        except ValueFault as fault:
            raise UserError(f"{key} {fault}") from fault
    if not settings.out:
        raise UserError("no output: give --out DIR")


def _converters(settings: PrepareSettings, sources: list[Source]) -> list[Converter]:
    """The shape of each file, from its first good row; all must agree."""
    found = []
    for source in sources:
        first = next((row for _, row in islice(read_rows(source), 1000) if not isinstance(row, BadRow)), None)
        if first is None:
            bad = next((f"row {number}: {row}" for number, row in read_rows(source)), "no rows")
            raise UserError(f"{source.path}: {bad}")
        found.append(choose(settings, first, source.path))
        if (found[-1].shape, found[-1].kind) != (found[0].shape, found[0].kind):
            raise UserError(
                f"{source.path} has rows of shape {found[-1].shape}, {sources[0].path} of shape {found[0].shape}: "
                "prepare them apart, or name one with --shape or --map"
            )
    return found


def _origin(settings: PrepareSettings, sources: list[Source], converters: list[Converter], encoder: Encoder) -> Manifest:
    kept = {key: value for key, value in dataclasses.asdict(settings).items() if key not in HOW_IT_RUNS}
    template = {"name": encoder.template.name, "sha256": encoder.template.sha256, "text": encoder.template.text}
    return Manifest(
        SCHEMA, converters[0].kind, converters[0].shape, kept, [_named(source) for source in sources],
        [_named(source) for source in (find_sources(settings.exclude) if settings.exclude else [])],
        {"folder": settings.tokenizer, **tokenizer_fingerprint(encoder.tokenizer)}, template,
    )


def _named(source: Source) -> dict[str, Any]:
    return {"path": str(source.path), "bytes": source.bytes, "sha256": source.sha256()}


def _already(out: Path, manifest: Manifest, settings: PrepareSettings) -> PrepareReport | None:
    """The report of a data set that is there already and would come out the same. Raises UserError where `out` holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not is_prepared(out):
        raise UserError(f"{out}: exists and is no data set: give another --out")
    if settings.overwrite:
        return None
    old = read_manifest(out)
    differing = changes(old, manifest)
    if differing:
        raise UserError(f"{out}: holds a data set made otherwise ({'; '.join(differing)}): add --overwrite to prepare it anew, or give another --out")
    part = out / "validation"
    return PrepareReport(out, old, read_manifest(part) if is_prepared(part) else None, unchanged=True)


def open_or_prepare(
    source: str,
    kind: str,
    tokenizer_folder: str,
    max_prompt_tokens: int = 0,
    template: str | None = None,
    enable_thinking: bool | None = None,
    cache_dir: str | Path = "",
    progress: Progress | None = None,
    **more: object,
) -> PromptSet | PairSet:
    """The data set that `data.train` or `data.eval` names.

    A folder made by `msrl data prep` is opened after its tokenizer and template are found to be the model's. Any other file, folder or
    glob of rows is prepared into `cache_dir`, once for each content and settings. Prompts over `max_prompt_tokens` (0: no limit) are
    left out and counted (`left_out`) either way. `more`: other PrepareSettings for rows that are prepared here.
    Raises UserError with what to run.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() and is_prepared(folder):
        opened = _open(folder, kind, max_prompt_tokens)
        check_fits(opened.manifest, folder, tokenizer_folder, template, enable_thinking)
        return opened
    settings = PrepareSettings(
        input=[source], tokenizer=tokenizer_folder, kind=kind, template=template, enable_thinking=enable_thinking, **more,  # type: ignore[arg-type]
    )
    tokenizer = load_tokenizer(tokenizer_folder)
    sources = find_sources([source])
    made_with = [str(tokenizer_fingerprint(tokenizer)), find_template(template, tokenizer).sha256]
    key = _content_key(settings, [*(item.sha256() for item in sources), *made_with])
    out = Path(cache_dir).expanduser() / f"{sources[0].path.name.partition('.')[0]}-{key}"
    try:
        prepare(dataclasses.replace(settings, out=str(out), overwrite=False), progress)
    except UnknownColumns as fault:
        command = f"msrl data prep --input {source} --kind {kind} --tokenizer {tokenizer_folder} --out DIR {fault.naming}"
        raise UserError(f"{fault.problem}: prepare them with their columns named, then give DIR in place of the file: {command}") from fault
    return _open(out, kind, max_prompt_tokens)


def _open(folder: Path, kind: str, max_prompt_tokens: int) -> PromptSet | PairSet:
    opened = (PromptSet if kind == "prompts" else PairSet).open(folder, max_prompt_tokens)
    if len(opened) == 0:
        raise UserError(f"{folder}: none of its {opened.manifest.rows} rows has a prompt of at most {max_prompt_tokens} tokens: raise data.max_prompt_tokens")
    return opened


def check_fits(manifest: Manifest, folder: Path, tokenizer_folder: str, template: str | None = None, enable_thinking: bool | None = None) -> None:
    """Raises UserError where a data set was prepared with another tokenizer or chat template than the run's, and says what to run."""
    tokenizer = load_tokenizer(tokenizer_folder)
    own = tokenizer_fingerprint(tokenizer)
    kept = {key: manifest.tokenizer.get(key) for key in own}
    problem = ""
    if kept != own:
        what = next(key for key in own if kept[key] != own[key])
        problem = f"another tokenizer than the model's in {tokenizer_folder} ({_said(what)} differs)"
    elif (template is not None or manifest.template["name"] == OWN) and find_template(template, tokenizer).sha256 != manifest.template["sha256"]:
        problem = f"another chat template ({manifest.template['name']}) than {template or 'the tokenizer has now'}"
    elif enable_thinking is not None and manifest.settings.get("enable_thinking") != enable_thinking:
        problem = f"enable_thinking={manifest.settings.get('enable_thinking')}, the run has {enable_thinking}"
    if problem:
        raise UserError(f"{folder}: was prepared with {problem}. Run: {prep_command(manifest, folder, tokenizer_folder, template, enable_thinking)}")


def _said(what: str) -> str:
    return {"vocabulary": "the vocabulary", "probe": "the way text is split", "bos": "the BOS token", "eos": "the EOS token"}.get(what, what)


def prep_command(manifest: Manifest, folder: Path, tokenizer: str, template: str | None, enable_thinking: bool | None) -> str:
    """The line that prepares a data set's sources anew for another tokenizer or template."""
    settings = manifest.settings
    parts = ["msrl data prep", *(f"--input {path}" for path in settings["input"]), f"--kind {manifest.kind}"]
    if settings["map"]:
        parts.append("--map " + " ".join(f"{key}={value}" for key, value in settings["map"].items()))
    parts += [f"--tokenizer {tokenizer}", f"--out {folder} --overwrite"]
    if template is not None:
        parts.append(f"--template {template}")
    if enable_thinking is not None:
        parts.append("--thinking" if enable_thinking else "--no-thinking")
    return " ".join(parts)


def _content_key(settings: PrepareSettings, manifest_parts: list[str]) -> str:
    """16 hex digits for a cache's folder: what is prepared, and how."""
    kept = {key: value for key, value in dataclasses.asdict(settings).items() if key not in (*HOW_IT_RUNS, "input", "exclude", "tokenizer")}
    text = json.dumps([kept, manifest_parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
