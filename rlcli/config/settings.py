"""The schema as a flat table: every setting by its dotted key, with type, default, range and meaning; and values checked against it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import MISSING

from rlcli.config.schema import DapoRecipe, DpoRecipe

SCHEMAS: dict[str, type] = {"dapo": DapoRecipe, "dpo": DpoRecipe}


class ValueFault(Exception):
    """A value that its setting does not take: the text says what the setting needs and what was given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the schema. `type` is the type without None; `default` is MISSING where a recipe must give a value."""

    key: str
    type: Any
    optional: bool
    default: Any
    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] | None = None

    @property
    def required(self) -> bool:
        return isinstance(self.default, str) and self.default == MISSING

    @property
    def kind(self) -> str:
        """The type in words, with the range or the choices: what `recipes show` and errors say."""
        words = " or ".join(self.choices) if self.choices else _TYPE_WORDS.get(self.type, str(self.type))
        bounds = [f"{word} {bound:g}" for word, bound in (("at least", self.least), ("above", self.above), ("at most", self.most)) if bound is not None]
        return f"{words} {' and '.join(bounds)}".strip() + (", or null" if self.optional else "")


_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[str]: "a list of texts [a, b]",
    list[float]: "a list of numbers [a, b]",
}


def table(kind: str) -> dict[str, Setting]:
    """All settings of `dapo` or `dpo`, by dotted key, in the order of the schema."""
    return {setting.key: setting for setting in _walk(SCHEMAS[kind], "")}


def settings_of(schema: type) -> dict[str, Setting]:
    """All settings of any dataclass whose fields are made by `schema.setting`."""
    return {setting.key: setting for setting in _walk(schema, "")}


def sections(kind: str) -> dict[str, type]:
    """The sections (data, rollout, ...) of a schema and their dataclasses."""
    hints = typing.get_type_hints(SCHEMAS[kind])
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def _walk(schema: type, prefix: str) -> typing.Iterator[Setting]:
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{prefix}{item.name}.")
            continue
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        kind, optional = _strip_none(hint)
        meaning = {name: value for name, value in item.metadata.items() if name in Setting.__dataclass_fields__}
        yield Setting(f"{prefix}{item.name}", kind, optional, default, **meaning)


def _strip_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], True
    return hint, False


def convert(setting: Setting, node: yaml.Node) -> Any:
    """The value that a YAML node means for this setting; raises ValueFault for the wrong type, range or choice.

    The node's own text decides, not YAML's guess: `off` stays a text where the setting is a text, `1e-6` is a number.
    """
    value = _convert_type(setting, setting.type, node)
    if value is not None:
        check_range(setting, value)
    return value


def _convert_type(setting: Setting, kind: Any, node: yaml.Node) -> Any:
    if _is_null(node) and setting.optional:
        return None
    if typing.get_origin(kind) is list:
        if not isinstance(node, yaml.SequenceNode):
            raise ValueFault(f"needs {setting.kind}, not {describe(node)}")
        inner = typing.get_args(kind)[0]
        return [_convert_scalar(setting, inner, item) for item in node.value]
    return _convert_scalar(setting, kind, node)


def _convert_scalar(setting: Setting, kind: type, node: yaml.Node) -> Any:
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    if text is None or _is_null(node):
        raise ValueFault(f"needs {setting.kind}, not {describe(node)}")
    if kind is str:
        return text
    try:
        return _PARSERS[kind](text.strip())
    except ValueError:
        raise ValueFault(f"needs {setting.kind}, not {describe(node)}") from None


def _parse_bool(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_PARSERS: dict[type, Any] = {int: int, float: _parse_float, bool: _parse_bool}


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def describe(node: yaml.Node) -> str:
    """A YAML node in a few characters, for error messages."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a group of settings"
    if _is_null(node):
        return "null"
    text = str(node.value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def check_range(setting: Setting, value: Any) -> None:
    """Raise ValueFault where a value (each item of a list) is out of the setting's range or not among its choices."""
    for item in value if isinstance(value, list) else [value]:
        outside = (
            (setting.choices is not None and item not in setting.choices)
            or (setting.least is not None and item < setting.least)
            or (setting.above is not None and item <= setting.above)
            or (setting.most is not None and item > setting.most)
        )
        if outside:
            near = difflib.get_close_matches(str(item), setting.choices, 1, 0.5) if setting.choices else []
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueFault(f"must be {setting.kind}, not {item}{hint}")


def nearest(key: str, known: typing.Iterable[str]) -> str | None:
    """The known dotted key that a wrong one most likely meant, in its own section or in another; None where nothing is near."""
    names = list(known)
    section, _, leaf = key.rpartition(".")
    close = difflib.get_close_matches(key, names, 1, 0.8)
    if close:
        return close[0]

    def likeness(name: str) -> float:
        own_section, _, own_leaf = name.rpartition(".")
        bonus = 0.1 * difflib.SequenceMatcher(None, section, own_section).ratio()
        return difflib.SequenceMatcher(None, leaf, own_leaf).ratio() + bonus

    best = max(names, key=likeness)
    return best if likeness(best) >= 0.7 else None
