"""Checkpoints of a run: the training ranks write model and optimizer, the driver everything else, and the store makes it one thing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.checkpoint import disk
from rlcli.checkpoint.groups import Arrays
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.state import write_state
from rlcli.checkpoint.store import Store
from rlcli.config.schema import CheckpointConfig
from rlcli.engines.base import TrainEngine
from rlcli.engines.rollout_setup import end_tokens
from rlcli.errors import MsrlError, UserError, WorkerLost
from rlcli.models.spec import ModelSpec

MODEL = "model"  # folder of a checkpoint that the ranks write
State = Mapping[str, tuple[Mapping[str, Any], Arrays | None]]  # by name: values and arrays


@dataclass
class Saver:
    """Saves at once or while training goes on. `tell` gets a line where a save that ran beside the training failed: it costs no run.

    Only where a worker was lost over it the run ends, with that error.
    """

    store: Store
    trainer: TrainEngine
    config: CheckpointConfig
    tell: Callable[[str], None]
    newest: int = field(default=-1, init=False)  # step of the newest save that was begun and has not failed, or of the checkpoint resumed from
    _pending: tuple[int, Manifest] | None = field(default=None, init=False)  # what the ranks still write
    _sealing: int | None = field(default=None, init=False)  # step of what the store still completes

    def save(self, manifest: Manifest, state: State) -> None:
        """Write the checkpoint of `manifest.step`. Asynchronous: returns as soon as training may change the state.

        Raises what went wrong with this one; what went wrong with one before is told.
        """
        self.settle()
        self.trainer.what = f"step {manifest.step}, save"
        with disk.named("write to", self.store.folder):
            self._begin(manifest, state)
        self._pending, self.newest = (manifest.step, manifest), manifest.step
        if not self.config.asynchronous:
            self.wait()

    def try_save(self, manifest: Manifest, state: State) -> None:
        """Save beside the training: a failure to write is told, and the run goes on with the checkpoints it has."""
        self._telling(manifest.step, lambda: self.save(manifest, state))

    def poll(self) -> None:
        """Complete what the ranks have finished writing, and tell what failed, without waiting."""
        if self._pending is not None:
            self._telling(self._pending[0], lambda: self._hand_over(wait=False))
        if self._sealing is not None and not self.store.busy:
            self._telling(self._sealing, self._seal)

    def settle(self) -> None:
        """Return when no save is under way any more; one that failed is told."""
        step = self._pending[0] if self._pending else self._sealing
        if step is not None:
            self._telling(step, self.wait)

    def wait(self) -> None:
        """Return when every save that was begun is complete on disk. Raises what went wrong, once."""
        self._hand_over(wait=True)
        self._seal()

    def _begin(self, manifest: Manifest, state: State) -> None:
        folder = self.store.begin(manifest.step)
        try:
            for name, (values, arrays) in state.items():
                write_state(folder, name, values, arrays)
            disk.make_folder(folder / MODEL)
            self.trainer.save(folder / MODEL, self.config.asynchronous, self.config.save_optimizer)
        except BaseException:
            self.store.abandon(manifest.step)
            raise

    def _hand_over(self, wait: bool) -> None:
        """Let the store complete what the ranks have written."""
        if self._pending is None:
            return
        (step, manifest), stage = self._pending, self.trainer.what
        self.trainer.what = f"step {step}, save"  # whatever the trainer does by now: what fails here is the save
        try:
            if not self.trainer.saved(wait=wait):
                return
        except BaseException:
            self._forget(step)
            raise
        finally:
            self.trainer.what = stage
        self._pending, self._sealing = None, step
        self.store.finish_later(step, manifest)

    def _seal(self) -> None:
        """Wait for the store, which removes what it could not complete."""
        step, self._sealing = self._sealing, None
        try:
            self.store.wait()
        except BaseException:
            self.newest = -1 if self.newest == step else self.newest
            raise

    def _forget(self, step: int) -> None:
        self._pending, self.newest = None, -1
        self.store.abandon(step)

    def _telling(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
        except WorkerLost:
            raise
        except MsrlError as error:
            self.tell(f"the checkpoint of step {step} was not saved: {error}")


def export_final(trainer: TrainEngine, final: Path) -> None:
    """Write the trained model as an HF folder; that of an earlier end of the same run is replaced once the new one is whole."""
    trainer.what = "export"
    fresh, old = final.with_name(f".{final.name}-new"), final.with_name(f".{final.name}-old")
    half = fresh.with_name(f"{fresh.name}.partial")  # as `HfWriter` calls it
    for path in (half, fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    try:
        trainer.export(fresh)
        with disk.named("rename", fresh):
            if final.exists():
                final.rename(old)
            fresh.rename(final)
    except BaseException:
        for path in (half, fresh):  # half a model is none, and takes up room
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


INERT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")  # in config.json, and no matter to a run


def model_identity(spec: ModelSpec) -> dict[str, str]:
    """What a resumed run's model folder must agree in: all but the weights, which the checkpoint has."""
    shapes = sorted((name, list(info.shape)) for name, info in spec.tensors.items())
    tokenizer = next((path for path in (spec.folder / "tokenizer.json", spec.folder / "tokenizer.model") if path.is_file()), None)
    config = {key: value for key, value in spec.config.items() if key not in INERT}
    return {
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer else "",
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "end tokens": " ".join(map(str, end_tokens(spec.folder))),
    }


WHERE = {"shapes": "its tensors have other names or shapes", "tokenizer": "tokenizer.json", "config": "config.json", "end tokens": "the tokens that end a response"}


def require_same_model(folder: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise UserError where a checkpoint's run had another model folder than it is given now; checkpoints of an older msrl noted less."""
    other = [WHERE[key] for key in now if key in saved and saved[key] != now[key]]
    if other:
        raise UserError(f"the model in {folder} is not the one that the checkpoint was made with ({', '.join(other)}): give the same one as model=DIR")


def require_same(what: str, saved: Any, now: Any, remedy: str) -> None:
    """Raise UserError where a checkpoint was made with something else than the run is given now."""
    if saved != now:
        raise UserError(f"{what} is not the one that the checkpoint was made with: {remedy}")


def open_store(folder: Path, config: CheckpointConfig, say: Callable[[str], None]) -> Store:
    return Store(folder, config.keep_last, config.keep_every, config.keep_best, say)
