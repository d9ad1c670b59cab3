"""From a HF folder to a checked ModelSpec. A new family is one file with a FAMILY, named in FAMILIES."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlcli.errors import UserError
from rlcli.models import deepseek, llama, mistral, qwen2, qwen3, qwen3_moe
from rlcli.models.files import FLOATS, read_folder, read_json
from rlcli.models.spec import Family, ModelSpec
from rlcli.models.unfinished import refuse_unfinished

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, mistral.FAMILY, qwen3_moe.FAMILY, deepseek.FAMILY)
COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts")
MOST, MOST_EXPERTS = 5_000, 100_000  # of each count; of experts in all layers: several times what the largest models have
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def read_model(folder: str | Path, tokenizer: bool = True, training: bool = True, unfinished: bool = False) -> ModelSpec:
    """The checked description of the HF model in `folder`, from config.json and the safetensors headers alone.

    Raises UserError, naming file and key, for a missing or truncated file, an unsupported architecture or setting, and tensors that are
    missing, superfluous, quantised or of other shapes than config.json says. `tokenizer=False` does not ask for a tokenizer,
    `training=False` takes families that can be converted but not trained too, `unfinished` a folder whose writer has not named it yet.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; model must be a folder in Hugging Face format")
    if not unfinished:
        refuse_unfinished(folder)
    spec = replace(read_config(read_json(folder / "config.json"), folder), tensors=read_folder(folder))
    if training and not spec.family.trains:
        raise UserError(f"{folder}: {spec.config['architectures'][0]} can be converted (`msrl ckpt convert`) but not trained")
    check_tensors(spec)
    if tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder}: has no tokenizer ({' or '.join(TOKENIZER_FILES)})")
    return spec


def read_config(config: dict[str, Any], folder: Path) -> ModelSpec:
    """The description from config.json's content alone; `tensors` stays empty."""
    where = f"{folder / 'config.json'}"
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: architectures is {names!r}; a list of names is needed")
    family = next((f for f in FAMILIES if any(n in f.architectures for n in names)), None)
    if family is None:
        known = ", ".join(a for f in FAMILIES for a in f.architectures)
        raise UserError(f"{where}: architecture {', '.join(names) or '(none named)'} is not supported (only {known})")
    _check_counts(config, where)
    return ModelSpec(folder=folder, family=family, config=config, **family.read(config, where))


def _check_counts(config: dict[str, Any], where: str) -> None:
    """Refuse at once what would make a table of weights without end."""
    counts = {key: value for key in COUNTS if isinstance(value := config.get(key), int)}
    for key, value in counts.items():
        if value > MOST:
            raise UserError(f"{where}: {key} is {value}; more than {MOST} is not supported")
    layers, experts = counts.get("num_hidden_layers", 1), max([counts[key] for key in COUNTS if "experts" in key and key in counts], default=1)
    if layers * experts > MOST_EXPERTS:
        raise UserError(f"{where}: {layers} layers of {experts} experts are more than the {MOST_EXPERTS} in all that are supported")


def check_tensors(spec: ModelSpec) -> None:
    """Every tensor that the table asks for is there with its shape and a float dtype, and no other is."""
    wanted = {s.name: s.shape for rule in spec.rules for s in rule.sources}
    for name, shape in wanted.items():
        info = spec.tensors.get(name)
        if info is None:
            raise UserError(f"{spec.folder}: tensor {name} is missing from the safetensors")
        if info.shape != shape:
            raise UserError(f"{info.file}: {name} has shape {list(info.shape)}, but config.json makes it {list(shape)}")
        if info.dtype not in FLOATS:
            raise UserError(f"{info.file}: {name} has dtype {info.dtype}; only {', '.join(sorted(FLOATS))} can be trained")
    extra = [n for n in spec.tensors if n not in wanted and not ignored(spec, n)]
    if extra:
        raise UserError(f"{spec.tensors[extra[0]].file}: holds {extra[0]}, which a {spec.family.name} model of this config.json does not have")


def ignored(spec: ModelSpec, name: str) -> bool:
    """True for tensors that carry nothing of their own: those the family names, and a stored copy of a tied head."""
    return (spec.tied and name == "lm_head.weight") or any(
        fnmatch(name, pattern.replace("{layers}", str(spec.layers))) for pattern in spec.family.ignored
    )
