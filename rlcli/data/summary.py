"""What a preparation did, on one screen: the steps with their counts, lengths, speed, and where it lies. Lines in rich's markup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from rlcli.data.clean import STEPS
from rlcli.data.manifest import Manifest
from rlcli.data.prepare import PrepareReport


def summary(report: PrepareReport) -> list[str]:
    """The screen that `msrl data prep` ends with."""
    manifest = report.manifest
    lines = [_title(report), ""]
    lines += _steps(manifest)
    lines += ["", *_notes(manifest), ""] if _notes(manifest) else [""]
    lines += _lengths(manifest)
    lines += ["", _tokenizer(manifest)]
    if not report.unchanged:
        lines.append(_speed(report))
    return [*lines, "", *_places(report)]


def _title(report: PrepareReport) -> str:
    manifest = report.manifest
    sources = manifest.sources
    size = human_bytes(sum(source["bytes"] for source in sources))
    named = Path(sources[0]["path"]).name if len(sources) == 1 else f"{len(sources)} files"
    done = "  [yellow]unchanged: nothing to do[/yellow]" if report.unchanged else ""
    return f"[bold]{escape(named)}[/bold]  {size}, {manifest.kind} of shape [cyan]{manifest.shape}[/cyan]{done}"


def _steps(manifest: Manifest) -> list[str]:
    counts = manifest.counts
    width = len(f"{counts['read']:,}") + 1
    lines = [f"  {counts['read']:>{width},}  rows read"]
    for name, text in STEPS.items():
        if counts[name]:
            lines.append(f"  [red]{f'-{counts[name]:,}':>{width}}[/red]  {text}{_limit(name, manifest)}")
    lines.append(f"  {'-' * width}")
    if counts["validation"]:
        lines.append(f"  {counts['validation']:>{width},}  {manifest.kind} set apart for validation")
    lines.append(f"  [bold green]{counts['kept']:>{width},}[/bold green]  [bold]{manifest.kind} to train on[/bold]")
    return lines


def _limit(name: str, manifest: Manifest) -> str:
    longest = manifest.notes.get("longest_prompt", 0)
    if name == "long_prompt":
        return f" (over {manifest.settings['max_prompt_tokens']:,} tokens; the longest has {longest:,})"
    if name == "long":
        return f" (over {manifest.settings['max_tokens']:,} tokens together; the longest has {manifest.notes.get('longest', 0):,})"
    return " (listed in skipped.jsonl)" if name in ("bad", "not_rendered") else ""


def _notes(manifest: Manifest) -> list[str]:
    notes, lines = manifest.notes, []
    if notes.get("distinct_prompts"):
        same = notes["distinct_prompts"] == notes["distinct_normal"]
        more = "" if same else f", {notes['distinct_normal']:,} when whitespace does not count"
        lines.append(f"  {notes['distinct_prompts']:,} distinct prompts{more}")
    if notes.get("held_out"):
        lines.append(f"  compared with {notes['held_out']:,} held-out questions: {manifest.counts['excluded_exact']} equal, {manifest.counts['excluded_near']} nearly equal")
    if notes.get("conflicting_prompts"):
        what = "dropped" if manifest.settings["conflicts"] == "drop" else "kept as rows of their own; --conflicts drop leaves them out"
        lines.append(f"  [yellow]{notes['conflicting_prompts']:,} prompt{'s' * (notes['conflicting_prompts'] > 1)} came with different answers[/yellow] ({what}): conflicts.jsonl")
    if notes.get("boundary"):
        lines.append(f"  [yellow]{notes['boundary']:,} row{'s' * (notes['boundary'] > 1)}[/yellow] whose prompt and answer the tokenizer would merge: their ids part where the prompt ends")
    if notes.get("special"):
        lines.append(f"  [yellow]{notes['special']:,} row{'s' * (notes['special'] > 1)}[/yellow] whose own text holds the tokenizer's special tokens")
    return lines


def _lengths(manifest: Manifest) -> list[str]:
    names = ("min", "mean", "p50", "p90", "p99", "max")
    heads = ("min", "mean", "median", "90 %", "99 %", "max")
    lines = ["  [dim]tokens  " + "".join(f"{head:>9}" for head in heads) + f"{'all':>14}[/dim]"]
    for column in ("prompt", "chosen", "rejected"):
        if not (values := manifest.lengths.get(column)):
            continue
        lines.append(f"  {column:<8}" + "".join(f"{values[name]:>9,.0f}" for name in names) + f"{values['sum']:>14,}")
    return lines


def _tokenizer(manifest: Manifest) -> str:
    template = "the tokenizer's own" if manifest.template["name"] == "tokenizer" else manifest.template["name"]
    thinking = manifest.settings["enable_thinking"]
    thought = "" if thinking is None else f", thinking {'on' if thinking else 'off'}"
    ignored = "" if thinking is None or "enable_thinking" in manifest.template["text"] else " [yellow](this template knows no thinking)[/yellow]"
    return f"  tokenizer {escape(manifest.tokenizer['folder'])} ({manifest.tokenizer['size']:,} tokens), chat template {escape(template)}{thought}{ignored}"


def _speed(report: PrepareReport) -> str:
    rate = report.encoded / report.busy_s if report.busy_s else 0.0
    workers = "1 worker" if report.workers == 1 else f"{report.workers} workers"
    return f"  {report.seconds:.1f} s; rendered and tokenised {rate:,.0f} rows/s a worker ({workers})"


def _places(report: PrepareReport) -> list[str]:
    lines = []
    for manifest, place in ((report.manifest, report.out), (report.validation, report.out / "validation")):
        if manifest is not None:
            size = human_bytes(sum(file["bytes"] for file in manifest.files))
            files = f"{len(manifest.files)} file{'s' if len(manifest.files) > 1 else ''}"
            lines.append(f"  [bold]{escape(str(place))}[/bold]  {manifest.rows:,} rows, {files}, {size}, fingerprint {manifest.fingerprint[:12]}")
    return lines


def human_bytes(count: float) -> str:
    """A size in the unit that suits it."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def manifest_lines(manifest: Manifest) -> list[str]:
    """A manifest for reading: sources, settings that differ from the defaults, counts."""
    from rlcli.data.settings import PrepareSettings

    defaults = PrepareSettings()
    lines = ["[bold]made from[/bold]"]
    lines += [f"  {escape(source['path'])}  {human_bytes(source['bytes'])}  sha256 {source['sha256'][:12]}" for source in manifest.sources]
    lines += [f"  held out: {escape(source['path'])}  sha256 {source['sha256'][:12]}" for source in manifest.excluded]
    changed: dict[str, Any] = {
        key: value for key, value in manifest.settings.items() if key not in ("input", "exclude", "tokenizer") and value != getattr(defaults, key)
    }
    lines.append("[bold]settings[/bold]  " + (escape("  ".join(f"{key}={value!r}" for key, value in changed.items())) or "all by default"))
    return [*lines, _tokenizer(manifest).strip(), "", *_steps(manifest), "", *_lengths(manifest)]
