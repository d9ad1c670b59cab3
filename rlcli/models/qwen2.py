"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from rlcli.models.config import dense_fields, refuse
from rlcli.models.decoder import dense_table
from rlcli.models.spec import Family


def _read(config: dict[str, Any], where: str) -> dict[str, Any]:
    refuse(config, where, use_sliding_window=(False,))
    return {**dense_fields(config, where), "qkv_bias": True}


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, dense_table)
