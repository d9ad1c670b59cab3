"""Every setting of the schema is read by code: a setting that nothing reads would lie to its users.

A read is `section.name` where the section is known: a chain that ends in the section's own field (`config.rollout.temperature`,
`rollout.temperature` of a recipe), or a name that is annotated with the section's class, or that such a chain was assigned to.
Where a parameter is annotated as Any its name decides: `config` is a recipe of either kind, `train` the section of that name.
A class with fields that hold sections hands them on wherever it is named in an annotation.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlcli.config.settings import SCHEMAS, sections, table

PACKAGE = Path(__file__).resolve().parents[2] / "rlcli"
# Reading a setting to check or to show it is not using it.
NO_USE = {PACKAGE / "config" / name for name in ("schema.py", "settings.py", "load.py", "check.py", "plan.py", "memory.py", "mindspeed.py", "recipes.py")}

# Section classes by name -> (kind, section); SHARED: the name of a section -> its class in each kind.
CLASSES = {cls.__name__: {(kind, name)} for kind in SCHEMAS for name, cls in sections(kind).items()}
for _kind in SCHEMAS:
    for _name, _cls in sections(_kind).items():
        CLASSES[_cls.__name__].add((_kind, _name))
RECIPES = {cls.__name__: kind for kind, cls in SCHEMAS.items()}


class Reads(ast.NodeVisitor):
    """Settings that one module reads, as (kind, "section.name"); `recipe` is the set of kinds that a bare recipe may be here."""

    def __init__(self, holders: dict[str, dict[str, set[tuple[str, str]]]] | None = None) -> None:
        self.holders = holders or {}
        self.found: set[tuple[str, str]] = set()
        self.scopes: list[dict[str, set[tuple[str, str]]]] = [{}]  # name -> (kind, section); section "" is a whole recipe
        self.fields: dict[str, set[tuple[str, str]]] = {}  # self.NAME -> the same

    def meaning(self, node: ast.expr | None) -> set[tuple[str, str]]:
        """What sections, or whole recipes, an expression may be."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), set())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.fields:
                return self.fields[node.attr]
            if node.attr in RECIPES.values():  # Loaded.dapo, Loaded.dpo: a typed recipe, unless it is a section of one
                inner = self.meaning(node.value)
                if not inner:
                    return {(node.attr, "")}
            inner = self.meaning(node.value)
            held = {place for name, _ in inner if name in self.holders for place in self.holders[name].get(node.attr, ())}
            return held | {(kind, node.attr) for kind, section in inner if kind in SCHEMAS and section == "" and node.attr in sections(kind)}
        return set()

    def annotated(self, node: ast.expr | None, parameter: str = "") -> set[tuple[str, str]]:
        """What an annotation names, in a union or a string too; where it is Any, what the parameter's name says."""
        if node is None:
            return set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, parameter)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if names == {"Any"} and parameter:
            return {(kind, "" if parameter == "config" else parameter) for kind in SCHEMAS if parameter == "config" or parameter in sections(kind)}
        return {(name, "") for name in names & set(self.holders)} | {(RECIPES[name], "") for name in names & set(RECIPES)} | {place for name in names & set(CLASSES) for place in CLASSES[name]}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            scope[argument.arg] = self.annotated(argument.annotation, argument.arg)
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.fields = fields_of(node, self)
        self.generic_visit(node)
        self.fields = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name):
                    self.scopes[-1][name.id] = self.meaning(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            for kind, section in self.meaning(node.value):
                self.found.add((kind, f"{section}.{node.attr}" if section else node.attr))
        self.generic_visit(node)


def fields_of(node: ast.ClassDef, reads: Reads) -> dict[str, set[tuple[str, str]]]:
    """A class's own fields that hold a recipe or a section: annotated ones, and those set from arguments in `__init__`."""
    out = {item.target.id: reads.annotated(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            reads.scopes.append({a.arg: reads.annotated(a.annotation, a.arg) for a in method.args.args})
            for item in ast.walk(method):
                if isinstance(item, ast.Assign):
                    for target in item.targets:
                        pairs = zip(target.elts, item.value.elts, strict=False) if isinstance(target, ast.Tuple) and isinstance(item.value, ast.Tuple) else [(target, item.value)]
                        for name, value in pairs:
                            if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
                                out[name.attr] = out.get(name.attr, set()) | reads.meaning(value)
            reads.scopes.pop()
    return out


def holders_of(trees: list[ast.Module]) -> dict[str, dict[str, set[tuple[str, str]]]]:
    """Classes with fields that are annotated as sections or recipes: class -> field -> what it may be."""
    plain = Reads()
    found = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        fields = {item.target.id: plain.annotated(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
        if any(fields.values()) and node.name not in RECIPES:
            found[node.name] = fields
    return found


def reads_of(*texts: str) -> set[tuple[str, str]]:
    trees = [ast.parse(text) for text in texts]
    holders = holders_of(trees)
    found: set[tuple[str, str]] = set()
    for tree in trees:
        visitor = Reads(holders)
        visitor.visit(tree)
        found |= visitor.found
    return found


def all_reads() -> set[tuple[str, str]]:
    return reads_of(*(path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path not in NO_USE))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("def f(config: DapoRecipe):\n    return config.rollout.temperature", "rollout.temperature"),
        ("def f(config: 'DapoRecipe | None'):\n    return config.model", "model"),
        ("def f(rollout: RolloutConfig):\n    return rollout.temperature", "rollout.temperature"),
        ("def f(config: DapoRecipe):\n    rollout = config.rollout\n    return rollout.temperature", "rollout.temperature"),
        ("def f(config: DapoRecipe):\n    a, b = config.train, config.rollout\n    return b.temperature", "rollout.temperature"),
        ("def f(loaded):\n    config = loaded.dapo\n    return config.rollout.temperature", "rollout.temperature"),
        ("class A:\n    def __init__(self, c: DapoRecipe):\n        self.c = c\n    def f(self):\n        return self.c.rollout.temperature", "rollout.temperature"),
        ("class H:\n    rollout: RolloutConfig\ndef f(setup: H):\n    return setup.rollout.temperature", "rollout.temperature"),
        ("def f(config: Any):\n    return config.rollout.temperature", "rollout.temperature"),
        ("def f(rollout: Any):\n    return rollout.temperature", "rollout.temperature"),
        ("class A:\n    config: DapoRecipe\n    def f(self):\n        return self.config.dapo.epochs", "dapo.epochs"),
    ],
)
def test_the_reader_sees_a_read(text, key):
    assert ("dapo", key) in reads_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "def f(other):\n    return other.temperature",
        "def f(other: Any):\n    return other.temperature",
        "def f(config: Other):\n    return config.rollout.temperature",
        "def f(sampling: Sampling):\n    return sampling.temperature",
        "def f(config: DapoRecipe):\n    return config.eval.temperature",
        "def f(config: DapoRecipe):\n    config.rollout.temperature = 3",
        "text = 'rollout.temperature'",
    ],
)
def test_the_reader_is_not_fooled(text):
    assert ("dapo", "rollout.temperature") not in reads_of(text)


@pytest.mark.parametrize("kind", ["dapo", "dpo"])
def test_every_setting_is_read_by_code(kind):
    reads = all_reads()
    unread = [key for key in table(kind) if (kind, key) not in reads]
    assert unread == []
