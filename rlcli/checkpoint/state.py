"""State beside the model: JSON values and arrays, as two files that hold data and nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rlcli.checkpoint import disk
from rlcli.checkpoint.manifest import Damaged


def write_state(folder: Path, name: str, values: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
    """Write NAME.json and, where there are arrays, NAME.safetensors. Numbers come back bit for bit.

    Raises TypeError for values that JSON has no form for: a checkpoint that cannot be read back must not look written.
    """
    text = json.dumps(values, ensure_ascii=True)
    if json.loads(text) != _listed(values):
        raise TypeError(f"{name}: keys must be strings, and values plain, to come back from JSON as they are")
    disk.write_file(folder / f"{name}.json", text.encode())
    if arrays:
        disk.write_file(folder / f"{name}.safetensors", save({key: np.ascontiguousarray(array) for key, array in arrays.items()}))


def read_state(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """(values, arrays) that `write_state` was given. Raises Damaged where they cannot be read."""
    arrays = folder / f"{name}.safetensors"
    try:
        values = json.loads((folder / f"{name}.json").read_bytes())
        return values, load_file(arrays) if arrays.exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(f"state {name} cannot be read ({error})") from error


def _listed(value: Any) -> Any:
    """The value with its tuples as lists, which is how JSON gives them back."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    return value
