"""The settings of a preparation from a data recipe and `key=value` texts: strict, with the nearest right name for a wrong one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from rlcli.config import recipes
from rlcli.config.settings import Setting, ValueFault, convert, describe, nearest, settings_of
from rlcli.data.convert import TARGETS
from rlcli.data.settings import PrepareSettings
from rlcli.errors import UserError


def load_settings(dataset: str | None, given: dict[str, Any], texts: list[str], maps: list[str]) -> PrepareSettings:
    """PrepareSettings from a recipe (name or file, or none), then `texts` (key=value), then `given`, each over the one before.

    `maps`: column meanings (target=column). Where there are any, texts whose key is a meaning are taken as such too, so that
    `--map prompt=problem response=answer` reads as it looks. Raises UserError.
    """
    known = settings_of(PrepareSettings)
    values = _from_recipe(recipes.find("data", dataset), known) if dataset else {}
    pairs = [part for text in maps for part in text.split()]
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} is not key=value; files are given with --input")
        if maps and key in TARGETS:
            pairs.append(text)
        else:
            values[key] = _value(key, yaml.compose(value, Loader=yaml.SafeLoader) or yaml.ScalarNode("tag:yaml.org,2002:null", ""), known, "command line")
    if pairs:
        values["map"] = dict(_meaning(pair) for pair in pairs)
    values |= {key: value for key, value in given.items() if value is not None}
    return dataclasses.replace(PrepareSettings(), **values)


def _meaning(pair: str) -> tuple[str, str]:
    target, equals, column = pair.partition("=")
    if not equals:
        raise UserError(f"--map {pair}: write MEANING=COLUMN, for instance prompt=problem")
    return target, column


def _from_recipe(path: Path, known: dict[str, Setting]) -> dict[str, Any]:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())[:120]})") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}: a data recipe is a list of settings (key: value), one a line")
    return {key.value: _value(key.value, node, known, f"{path.name} line {key.start_mark.line + 1}") for key, node in root.value}


def _value(key: str, node: yaml.Node, known: dict[str, Setting], where: str) -> Any:
    if key not in known:
        near = nearest(key, known)
        raise UserError(f"{key} is not a setting of data preparation{f'; did you mean {near}?' if near else ''} ({where})")
    if key == "map":
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"map needs columns by meaning, for instance {{prompt: problem}}, not {describe(node)} ({where})")
        return {target.value: column.value for target, column in node.value}
    if key in ("input", "exclude", "keep") and isinstance(node, yaml.ScalarNode) and node.value:
        node = yaml.SequenceNode("tag:yaml.org,2002:seq", [node])
    try:
        return convert(known[key], node)
    except ValueFault as fault:
        raise UserError(f"{key} {fault} ({where})") from fault
