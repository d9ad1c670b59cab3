"""A run's configuration from a recipe, the recipes it builds on, and `key=value` overrides: strict, and all faults at once."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from rlcli.config import recipes
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.config.settings import SCHEMAS, Setting, ValueFault, convert, nearest, sections, table
from rlcli.errors import UserError

Recipe = DapoRecipe | DpoRecipe


@dataclass
class Loaded:
    """A checked configuration. `sources` says, for each setting that something gave, what gave it: "recipe NAME line N", "command line"."""

    kind: str
    config: Any
    recipe_name: str | None
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def dapo(self) -> DapoRecipe:
        """The configuration of `train dapo`, typed."""
        return cast(DapoRecipe, self.config)

    @property
    def dpo(self) -> DpoRecipe:
        """The configuration of `train dpo`, typed."""
        return cast(DpoRecipe, self.config)


@dataclass
class _Given:
    node: yaml.Node
    source: str


def load(kind: str, recipe: str | None, overrides: list[str], complete: bool = True) -> Loaded:
    """The configuration of `dapo` or `dpo` from a recipe (name or file, or none) and overrides, which win.

    complete: settings that a run needs must be given; without it they stay "???", for showing a recipe.
    Raises UserError with one line for each fault: unknown key, wrong type, out of range, missing.
    """
    faults: list[str] = []
    given: dict[str, _Given] = {}
    if recipe is not None:
        given.update(_read_recipe(kind, recipes.find(kind, recipe), faults, ()))
    given.update(_read_overrides(kind, overrides, faults))
    name = Path(recipe).stem if recipe is not None else None
    return Loaded(kind, _build(kind, given, faults, complete), name, {key: item.source for key, item in given.items()})


def from_dict(kind: str, data: dict[str, Any], overrides: list[str] | None = None, name: str | None = None) -> Loaded:
    """The same from a saved resolved configuration (a checkpoint's or a run folder's), with overrides on top."""
    faults: list[str] = []
    text = yaml.safe_dump(data)
    given = _read_mapping(kind, text, "saved configuration", faults, lines=False)
    given.update(_read_overrides(kind, overrides or [], faults))
    return Loaded(kind, _build(kind, given, faults), name, {key: item.source for key, item in given.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain dicts, lists and scalars."""
    return dataclasses.asdict(config)


def to_yaml(config: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def save_resolved(config: Any, path: Path) -> None:
    """Write the resolved configuration to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as out:
        out.write(to_yaml(config))
        out.flush()
        os.fsync(out.fileno())
    beside.replace(path)


def differences(kind: str, config: Any) -> dict[str, tuple[Any, Any]]:
    """Settings whose value is not the schema's default: key -> (default, value)."""
    return {
        key: (setting.default, value)
        for key, setting in table(kind).items()
        if (value := get(config, key)) != setting.default
    }


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _read_recipe(kind: str, path: Path, faults: list[str], chain: tuple[Path, ...]) -> dict[str, _Given]:
    """What a recipe gives, after what the recipe it names as `base` gives."""
    here = path.resolve()
    if here in chain:
        raise UserError(f"Recipes are based on each other in a circle: {' -> '.join(item.stem for item in (*chain, here))}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Recipe {path} cannot be read: {error}.") from None
    own = _read_mapping(kind, text, f"recipe {path.stem if path in recipes.available(kind).values() else path}", faults)
    base = own.pop("base", None)
    if base is None:
        return own
    if not isinstance(base.node, yaml.ScalarNode):
        faults.append(f"base: needs the name of a recipe ({base.source})")
        return own
    return {**_read_recipe(kind, recipes.find(kind, base.node.value, beside=path.parent), faults, (*chain, here)), **own}


def _read_mapping(kind: str, text: str, name: str, faults: list[str], lines: bool = True) -> dict[str, _Given]:
    """Every setting of a YAML text by dotted key; unknown keys and settings given twice are faults."""
    root = _compose(text, name)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"The {name} must be a list of settings (key: value), one a line.")
    given: dict[str, _Given] = {}
    for key, node, line in _flatten(kind, root, ""):
        source = f"{name} line {line}" if lines else name
        if key in given:
            faults.append(f"{key} is given twice: {given[key].source} and line {line}")
        elif key == "base" or _known(kind, key, node, source, faults):
            given[key] = _Given(node, source)
    return given


def _read_overrides(kind: str, overrides: list[str], faults: list[str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            faults.append(f"{text!r} is not an override: write key=value, for instance train.steps=20 (command line)")
            continue
        try:
            node = _compose(value, f"value of {key}") or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        except UserError as error:
            faults.append(str(error))
            continue
        for full, leaf, _ in _flatten(kind, node, key):
            if _known(kind, full, leaf, "command line", faults):
                given[full] = _Given(leaf, "command line")
    return given


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None and "\n" in text else ""
        raise UserError(f"The {name} is not valid YAML{where}: {getattr(error, 'problem', None) or error}.") from None


def _flatten(kind: str, node: yaml.Node, prefix: str) -> list[tuple[str, yaml.Node, int]]:
    """(dotted key, value, line) of each leaf; a mapping below a setting that is no section stays one leaf."""
    if not isinstance(node, yaml.MappingNode) or prefix in table(kind):
        return [(prefix, node, node.start_mark.line + 1 if node.start_mark else 0)]
    leaves: list[tuple[str, yaml.Node, int]] = []
    for name, value in node.value:
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        leaves.extend((full, leaf, max(line, name.start_mark.line + 1)) for full, leaf, line in _flatten(kind, value, key))
    return leaves


def _known(kind: str, key: str, node: yaml.Node, source: str, faults: list[str]) -> bool:
    settings = table(kind)
    if key in settings:
        return True
    if key in sections(kind):
        if isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~"):
            return False  # a section's heading with nothing under it gives nothing
        first = next(name for name in settings if name.startswith(f"{key}."))
        faults.append(f"{key} is a section, not a setting: write {first}=... or another of its settings ({source})")
        return False
    near = nearest(key, settings)
    elsewhere = next((other for other in SCHEMAS if other != kind and key in table(other)), None)
    hint = f" (it is one of `train {elsewhere}`)" if elsewhere else f"; did you mean {near}?" if near else ""
    faults.append(f"{key} is not a setting{hint} ({source})")
    return False


def _build(kind: str, given: dict[str, _Given], faults: list[str], complete: bool = True) -> Any:
    """The dataclass instance with every given value checked; raises one UserError for all faults."""
    settings = table(kind)
    values: dict[str, Any] = {}
    for key, item in given.items():
        try:
            values[key] = convert(settings[key], item.node)
        except ValueFault as fault:
            faults.append(f"{key} {fault} ({item.source})")
    if complete:
        faults.extend(_missing(setting) for setting in settings.values() if setting.required and setting.key not in given)
    if faults:
        raise UserError("\n".join(faults))
    return _instance(SCHEMAS[kind], values, "")


def _instance(schema: type, values: dict[str, Any], prefix: str) -> Any:
    """A section with its values. They are literal: `${...}` stays as it is, so a recipe from elsewhere cannot read the environment."""
    parts: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(schema).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            parts[name] = _instance(cast(type, hint), values, f"{key}.")
        elif key in values:
            parts[name] = values[key]
    return schema(**parts)


def _missing(setting: Setting) -> str:
    return f"{setting.key} is not set ({re.split('[:;]', setting.help)[0]}): give {setting.key}=..."
