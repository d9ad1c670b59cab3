"""Loading is strict: each fault is one line that names the key, the place and the nearest right key."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from rlcli.config.load import differences, from_dict, load, save_resolved, to_dict, to_yaml
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.config.settings import nearest, table
from rlcli.errors import UserError

NEEDED = ["model=/m", "data.train=rows.parquet"]


def faults(*overrides: str, recipe: str | None = None, kind: str = "dapo") -> list[str]:
    with pytest.raises(UserError) as caught:
        load(kind, recipe, [*NEEDED, *overrides])
    return str(caught.value).splitlines()


@pytest.fixture
def recipe(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_defaults_come_from_the_schema_and_the_rest_from_overrides():
    loaded = load("dapo", None, [*NEEDED, "dapo.clip_high=0.3"])
    assert loaded.config == dataclasses.replace(DapoRecipe(model="/m"), data=loaded.config.data, dapo=loaded.config.dapo)
    assert differences("dapo", loaded.config) == {
        "model": ("???", "/m"),
        "data.train": ("???", "rows.parquet"),
        "dapo.clip_high": (0.28, 0.3),
    }
    assert loaded.sources == dict.fromkeys(["model", "data.train", "dapo.clip_high"], "command line")
    assert loaded.recipe_name is None


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-6", "lr", 1e-6),
        ("optim.lr=2", "lr", 2.0),
        ("train.steps=0x10", None, None),
        ("train.prefix_sharing=off", "prefix_sharing", "off"),
        ("train.deterministic=yes", "deterministic", True),
        ("run.name=007", "name", "007"),
        ("run.name=null", "name", None),
        ("run.name=", "name", None),
        ("data.eval=a=b.parquet", "eval", "a=b.parquet"),
        ("reward.weights=[1, 0.5]", "weights", [1.0, 0.5]),
        ("run.trackers=[]", "trackers", []),
        ("rollout.stop=['${x}', \"a\\n\"]", "stop", ["${x}", "a\n"]),
        ("train={steps: 3}", "steps", 3),
    ],
)
def test_values_are_typed_by_the_setting(override, key, value):
    if key is None:
        assert "needs a whole number" in faults(override)[0]
        return
    config = load("dapo", None, [*NEEDED, override]).config
    section = override.split(".")[0].split("=")[0]
    got = getattr(getattr(config, section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("clip_high=0.3", "clip_high is not a setting; did you mean dapo.clip_high? (command line)"),
        ("dapo.clip_hihg=0.3", "dapo.clip_hihg is not a setting; did you mean dapo.clip_high? (command line)"),
        ("trian.steps=3", "trian.steps is not a setting; did you mean train.steps? (command line)"),
        ("train.lr=3", "train.lr is not a setting; did you mean optim.lr? (command line)"),
        ("dpo.beta=3", "dpo.beta is not a setting (it is one of `train dpo`) (command line)"),
        ("zzzzzz=1", "zzzzzz is not a setting (command line)"),
        ("train=3", "train is a section, not a setting: write train.steps=... or another of its settings (command line)"),
        ("train.steps", "'train.steps' is not an override: write key=value, for instance train.steps=20 (command line)"),
        ("train.steps=abc", "train.steps needs a whole number at least 1, not 'abc' (command line)"),
        ("train.steps=1.5", "train.steps needs a whole number at least 1, not '1.5' (command line)"),
        ("train.steps=null", "train.steps needs a whole number at least 1, not null (command line)"),
        ("train.steps=0", "train.steps must be a whole number at least 1, not 0 (command line)"),
        ("optim.lr=nan", "optim.lr needs a number at least 0, not 'nan' (command line)"),
        ("train.shuffle=maybe", "train.shuffle is not a setting; did you mean data.shuffle? (command line)"),
        ("data.shuffle=maybe", "data.shuffle needs true or false, not 'maybe' (command line)"),
        ("rollout.top_p=0", "rollout.top_p must be a number above 0 and at most 1, not 0.0 (command line)"),
        ("reward.verifiers=dapo", "reward.verifiers needs a list of texts [a, b], not 'dapo' (command line)"),
        ("reward.weights=[1, x]", "reward.weights needs a list of numbers [a, b], not 'x' (command line)"),
        ("data.train=[a]", "data.train needs a text, not a list (command line)"),
        ("train.on_nonfinite=skp", "train.on_nonfinite must be skip or stop, not skp (did you mean skip?) (command line)"),
        ("optim.lr=[", "The value of optim.lr is not valid YAML: expected the node content, but found '<stream end>'."),
    ],
)
def test_each_fault_is_one_clear_line(override, line):
    assert faults(override) == [line]


def test_all_faults_are_reported_at_once_with_the_missing_settings():
    with pytest.raises(UserError) as caught:
        load("dpo", None, ["train.steps=-1", "train.batch=3"])
    lines = str(caught.value).splitlines()
    assert lines == [
        "train.batch is not a setting; did you mean train.batch_pairs? (command line)",
        "train.steps must be a whole number at least 0, not -1 (command line)",
        "model is not set (HF folder of the model to train): give model=...",
        "data.train is not set (training pairs): give data.train=...",
    ]
    assert caught.value.exit_code == 2


def test_a_recipe_fault_names_file_and_line(recipe):
    path = recipe("# mine\ntrain:\n  steps: 5\n\n  batch_promts: 3\ndapo.clip_low: 9\n")
    assert faults(recipe=path) == [
        f"train.batch_promts is not a setting; did you mean train.batch_prompts? (recipe {path} line 5)",
        f"dapo.clip_low must be a number above 0 and at most 1, not 9.0 (recipe {path} line 6)",
    ]


def test_a_setting_given_twice_is_a_fault(recipe):
    path = recipe("train:\n  steps: 5\n  steps: 6\n")
    assert faults(recipe=path) == [f"train.steps is given twice: recipe {path} line 2 and line 3"]


def test_a_recipe_that_is_no_yaml_names_the_line(recipe):
    path = recipe("train:\n  steps: [5\n")
    assert faults(recipe=path)[0].startswith(f"The recipe {path} is not valid YAML line 3:")
    assert "must be a list of settings" in faults(recipe=recipe("just words\n"))[0]


def test_recipes_build_on_each_other_and_overrides_win(recipe):
    recipe("train:\n  steps: 5\n  seed: 7\noptim: {lr: 1}\n", "base.yaml")
    path = recipe("base: ./base.yaml\ntrain:\n  steps: 6\n")
    loaded = load("dapo", path, [*NEEDED, "optim.lr=3"])
    assert (loaded.config.train.steps, loaded.config.train.seed, loaded.config.optim.lr) == (6, 7, 3.0)
    assert loaded.sources["train.steps"] == f"recipe {path} line 3"
    assert loaded.sources["train.seed"].endswith("base.yaml line 3")
    assert loaded.sources["optim.lr"] == "command line"
    assert loaded.recipe_name == "mine"


def test_recipes_in_a_circle_are_refused(recipe):
    recipe("base: b.yaml\n", "a.yaml")
    path = recipe("base: a.yaml\n", "b.yaml")
    assert faults(recipe=path) == ["Recipes are based on each other in a circle: b -> a -> b."]


def test_an_unknown_recipe_names_the_nearest():
    assert "Did you mean qwen3_8b?" in faults(recipe="qwen3_8")[0]
    assert "is for dpo, not dapo: use `msrl train dpo --recipe demo_dpo`" in faults(recipe="demo_dpo")[0]
    assert faults(recipe="nowhere/x.yaml") == ["Recipe file nowhere/x.yaml does not exist."]


def test_an_empty_section_heading_gives_nothing(recipe):
    assert load("dapo", recipe("train:\noptim:\n  lr: 1\n"), NEEDED).config.train == DapoRecipe().train


@pytest.mark.parametrize("kind", ["dapo", "dpo"])
def test_a_saved_configuration_comes_back_equal(kind, tmp_path):
    config = load(kind, None, [*NEEDED, "run.name='off'", "optim.lr=1e-7", "run.trackers=[wandb]", "run.project='${x} \\${y}'"]).config
    assert from_dict(kind, to_dict(config)).config == config
    save_resolved(config, tmp_path / "run" / "config.yaml")
    assert (tmp_path / "run" / "config.yaml").read_text() == to_yaml(config)
    assert load(kind, str(tmp_path / "run" / "config.yaml"), []).config == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    again = from_dict(kind, to_dict(config), ["train.steps=9"])
    assert again.config.train.steps == 9
    assert again.sources["train.steps"] == "command line"
    with pytest.raises(UserError, match=r"train\.stesp is not a setting; did you mean train\.steps\? \(saved configuration\)"):
        from_dict(kind, {**to_dict(config), "train": {"stesp": 1}})


@pytest.mark.parametrize("schema", [DapoRecipe, DpoRecipe])
def test_the_schema_is_a_valid_omegaconf_structure_with_the_same_defaults(schema):
    kind = "dapo" if schema is DapoRecipe else "dpo"
    plain = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), {"model": "/m", "data": {"train": "rows.parquet"}}))
    assert plain == load(kind, None, NEEDED).config


@pytest.mark.parametrize("kind", ["dapo", "dpo"])
def test_every_default_is_within_its_own_range_and_has_a_meaning(kind):
    data = {key: setting for key, setting in table(kind).items() if not setting.required}
    for key, setting in data.items():
        assert setting.help, key
        if setting.choices:
            assert setting.default in setting.choices, key
    from_dict(kind, to_dict(load(kind, None, NEEDED).config))


def test_nearest_prefers_the_same_section():
    assert nearest("eval.temprature", table("dapo")) == "eval.temperature"
    assert nearest("rollout.temprature", table("dapo")) == "rollout.temperature"
    assert nearest("qqqq", table("dapo")) is None
