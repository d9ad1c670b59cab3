"""Qwen3: norms on query and key, a head_dim of its own, no biases."""

from __future__ import annotations

from typing import Any

from rlcli.models.config import dense_fields, refuse
from rlcli.models.decoder import dense_table
from rlcli.models.spec import Family


def read_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields that Qwen3's dense and expert models share."""
    refuse(config, where, use_sliding_window=(False,), attention_bias=(False,))
    return {**dense_fields(config, where), "qk_norm": True}


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), read_fields, dense_table)
