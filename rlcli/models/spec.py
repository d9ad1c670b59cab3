"""What msrl knows of a model before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.models.files import TensorInfo
from rlcli.models.rules import Rule


@dataclass(frozen=True)
class Family:
    """One model family: the architectures it serves, how its config.json is read, and its weight table."""

    name: str
    architectures: tuple[str, ...]
    read: Callable[[dict[str, Any], str], dict[str, Any]]  # (config.json, where) -> the fields of ModelSpec after `config`
    table: Callable[[ModelSpec], list[Rule]]
    ignored: tuple[str, ...] = ()  # patterns of HF tensors that hold no weights of the model proper; {layers} is the number of layers
    trains: bool = True  # False: `msrl ckpt convert` alone knows it


@dataclass(frozen=True)
class ModelSpec:
    """A checked HF folder. `transformer` holds TransformerConfig's and `gpt` GPTModel's arguments that the family decides."""

    folder: Path
    family: Family
    config: dict[str, Any]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    eps: float
    max_positions: int
    experts: int = 0
    expert_ffn: int = 0
    moe_layers: frozenset[int] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    transformer: dict[str, Any] = field(default_factory=dict)
    gpt: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)

    @property
    def rules(self) -> list[Rule]:
        """The weight table: one rule for each Megatron parameter, in model order."""
        if "_rules" not in self.__dict__:
            object.__setattr__(self, "_rules", self.family.table(self))
        return self.__dict__["_rules"]

    @property
    def placed(self) -> dict[tuple[int | str, int | None], list[Rule]]:
        """The rules by (layer or end of the pipeline, expert), so that a rank finds its own without walking through all."""
        if "_placed" not in self.__dict__:
            placed: dict[tuple[int | str, int | None], list[Rule]] = {}
            for rule in self.rules:
                placed.setdefault((rule.place, rule.expert), []).append(rule)
            object.__setattr__(self, "_placed", placed)
        return self.__dict__["_placed"]

    @property
    def dtype(self) -> str:
        """The torch name of the dtype that most of the folder's bytes have."""
        from rlcli.models.files import FLOATS

        bytes_of: dict[str, int] = {}
        for info in self.tensors.values():
            bytes_of[info.dtype] = bytes_of.get(info.dtype, 0) + info.stop - info.start
        return FLOATS.get(max(bytes_of, key=lambda k: bytes_of[k], default="F32"), "float32")

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        import math

        return sum(math.prod(s.shape) for rule in self.rules if not rule.copy for s in rule.sources)
