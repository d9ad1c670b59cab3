"""Where recipes are: packaged inside rlcli once installed, beside it in a checkout; or any YAML file by its path."""

from __future__ import annotations

import difflib
from pathlib import Path

from rlcli.errors import UserError

KINDS = ("dapo", "dpo")


def folders(kind: str) -> list[Path]:
    """Folders that hold recipes of a kind, the packaged one first."""
    package = Path(__file__).resolve().parent.parent
    places = [package / "recipes" / kind, package.parent / "recipes" / kind]
    return [place for place in places if place.is_dir()]


def available(kind: str) -> dict[str, Path]:
    """Packaged recipes of a kind by name."""
    found: dict[str, Path] = {}
    for folder in folders(kind):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def purpose(path: Path) -> str:
    """What a recipe is for: the text of its first comment line, or an empty text."""
    with path.open(encoding="utf-8") as lines:
        first = next(lines, "").strip()
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def model_name(path: Path) -> str:
    """The model that a recipe is made for: its "# model: NAME" comment, or an empty text."""
    with path.open(encoding="utf-8") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("# model:")), "")


def find(kind: str, name: str, beside: Path | None = None) -> Path:
    """The file of a recipe given by name or by path (relative to `beside` first); raises UserError where there is none."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser()
        candidates = [beside / path] if beside else []
        for candidate in [*candidates, path]:
            if candidate.is_file():
                return candidate
        raise UserError(f"Recipe file {name} does not exist.")
    known = available(kind)
    if name in known:
        return known[name]
    for other in KINDS:
        if other != kind and name in available(other):
            raise UserError(f"Recipe {name} is for {other}, not {kind}: use `msrl train {other} --recipe {name}`.")
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(known)}." if known else ""
    raise UserError(f"There is no {kind} recipe named {name}.{hint} A file is given by its path (FILE.yaml).")
