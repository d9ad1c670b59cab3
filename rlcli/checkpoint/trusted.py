"""Refusing a Megatron checkpoint that would run code when it is loaded.

Loading goes through torch's distributed checkpoints, whose index is a pickle, and so is every stored object that is no tensor; a pickle may call
any function. What Megatron writes calls very few. So before such a folder is loaded, its pickles are read here with just those at hand.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from rlcli.errors import UserError

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    *((f"{_DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}


def refuse_code(folder: Path) -> None:
    """Raise UserError, naming the file, where loading a folder in Megatron's distributed format would call what no checkpoint needs."""
    index = _read_index(folder / INDEX)
    try:
        kinds, places = index.state_dict_metadata, index.storage_data
        objects = [place for where, place in places.items() if type(kinds[where.fqn]).__name__ == "BytesStorageMetadata"]
        for place in places.values():
            _check_place(folder, place)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{folder / INDEX}: is not the index of a checkpoint ({error})") from error
    for place in objects:
        _check_object(folder / place.relative_path, place.offset, place.length)


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Strict(file, path).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UserError:
        raise
    except Exception as error:  # crafted or torn input may fail in any way
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _check_place(folder: Path, place: Any) -> None:
    name = PurePosixPath(place.relative_path)
    if name.is_absolute() or ".." in name.parts:
        raise UserError(f"{folder / INDEX}: points outside the checkpoint, to {place.relative_path}")
    if place.transform_descriptors:
        raise UserError(f"{folder / INDEX}: {place.relative_path} is transformed ({place.transform_descriptors}), which is not read here")


def _check_object(path: Path, offset: int, length: int) -> None:
    """torch's own restricted unpickler reads the very bytes that will be loaded."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: an object at byte {offset} is refused, for loading it might run code ({first})") from error


class _Strict(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise UserError(f"{self.path}: calls {module}.{name}, which no checkpoint needs; it is not loaded")

    def persistent_load(self, pid: Any) -> Any:
        raise UserError(f"{self.path}: refers to data outside itself; it is not loaded")
