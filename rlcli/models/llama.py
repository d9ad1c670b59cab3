"""Llama 2 and 3 (and SmolLM2): plain, linear and llama3 rope."""

from __future__ import annotations

from typing import Any

from rlcli.models.config import dense_fields, refuse
from rlcli.models.decoder import dense_table
from rlcli.models.spec import Family


def _read(config: dict[str, Any], where: str) -> dict[str, Any]:
    refuse(config, where, attention_bias=(False,))  # it would put a bias on o_proj too, which Megatron's attention has no switch for
    return dense_fields(config, where)


FAMILY = Family("llama", ("LlamaForCausalLM",), _read, dense_table, ignored=("*.rotary_emb.inv_freq",))
