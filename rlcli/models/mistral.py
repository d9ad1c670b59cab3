"""Mistral without sliding window."""

from __future__ import annotations

from typing import Any

from rlcli.models.config import dense_fields, refuse
from rlcli.models.decoder import dense_table
from rlcli.models.spec import Family


def _read(config: dict[str, Any], where: str) -> dict[str, Any]:
    refuse(config, where, sliding_window=())
    return dense_fields(config, where)


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, dense_table)
