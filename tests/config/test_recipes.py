"""Every packaged recipe is valid at all times, states only what differs, and says what it is for."""

from pathlib import Path

import pytest

from rlcli.config import recipes
from rlcli.config.load import get, load
from rlcli.config.settings import table

ALL = [(kind, name) for kind in recipes.KINDS for name in recipes.available(kind)]
STAND_INS = ["model=/models/any", "data.train=/data/rows.parquet"]


def load_recipe(kind: str, name: str):
    text = recipes.find(kind, name).read_text()
    missing = [item for item in STAND_INS if f"{item.split('=')[0].split('.')[-1]}: " not in text.replace("# model: ", "")]
    return load(kind, name, missing)


def test_the_promised_recipes_are_there():
    assert {"demo", "dapo_paper", "qwen25_32b", "qwen3_8b", "qwen3_30b_a3b"} <= set(recipes.available("dapo"))
    assert {"demo_dpo", "qwen3_30b_a3b"} <= set(recipes.available("dpo"))


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_recipe_is_valid_and_says_what_it_is_for(kind, name):
    load_recipe(kind, name)
    assert len(recipes.purpose(recipes.find(kind, name))) > 20


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_recipe_states_only_what_differs(kind, name):
    loaded = load_recipe(kind, name)
    settings = table(kind)
    own = [key for key, source in loaded.sources.items() if source.startswith(f"recipe {name} ")]
    assert own
    has_base = "\nbase:" in f"\n{recipes.find(kind, name).read_text()}"
    same = [key for key in own if not has_base and get(loaded.config, key) == settings[key].default]
    assert same == []


def test_recipes_are_found_packaged_before_beside(tmp_path, monkeypatch):
    package = tmp_path / "site" / "rlcli"
    for folder, comment in ((package / "recipes", "packaged"), (tmp_path / "site" / "recipes", "checkout")):
        (folder / "dapo").mkdir(parents=True)
        (folder / "dapo" / "one.yaml").write_text(f"# {comment}\n")
    (package / "config").mkdir()
    monkeypatch.setattr(recipes, "__file__", str(package / "config" / "recipes.py"))
    assert recipes.purpose(recipes.find("dapo", "one")) == "packaged"
    assert list(recipes.available("dapo")) == ["one"]
    assert isinstance(recipes.find("dapo", "one"), Path)
