"""What the trainers of both recipes do beside their steps: count refused updates, save, stop, and say what a checkpoint holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, Protocol

from rlcli.checkpoint.find import Checkpoint
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.state import read_state
from rlcli.config.load import to_dict
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.data.cursor import Cursor
from rlcli.engines.base import TrainEngine
from rlcli.errors import MsrlError, RunError, StoppedEarly, WorkerLost
from rlcli.runs.environment import versions
from rlcli.runs.folder import RunFolder
from rlcli.trainers.clock import Clock
from rlcli.trainers.saving import MODEL, Saver, State, export_final
from rlcli.trainers.stopping import Stopper


class Parts(Protocol):
    """The running parts that every loop needs."""

    run: RunFolder
    saver: Saver
    stopper: Stopper
    model: dict[str, str]  # identity of the model, for checkpoints

    @property
    def trainer(self) -> TrainEngine: ...


class Loop(ABC):
    """`step` counts finished steps of `steps`."""

    kind: str  # as in a manifest

    def __init__(self, config: DapoRecipe | DpoRecipe, parts: Parts, steps: int) -> None:
        self._config, self._parts, self.run, self.steps = config, parts, parts.run, steps
        self.clock = Clock()
        self.step = 0
        self.skipped_in_row = 0
        self.skipped_in_all = 0
        self.unsaved = ""  # what went wrong with the last checkpoint of the run
        self.newest: dict[str, float] = {}  # the last step's metrics, and those of an evaluation after it

    def complete(self, checkpoint: Checkpoint | None) -> None:
        """Train from the beginning or from a checkpoint to the end, and export the model."""
        if checkpoint is not None:
            self.restore(checkpoint)
        self.train()
        self.export()
        if self.unsaved:
            raise RunError(f"the trained model is in {self.run.final}; {self.unsaved}")
        self.run.console.info(f"the trained model is in {self.run.final}")

    def export(self) -> None:
        """Write the trained model. It is less than a checkpoint, and may fit where that did not."""
        try:
            export_final(self._parts.trainer, self.run.final)
        except WorkerLost:
            raise
        except MsrlError as error:
            raise RunError(f"{self.unsaved}\nthe trained model was not saved either: {error}" if self.unsaved else f"the trained model was not saved: {error}") from error

    @abstractmethod
    def train(self) -> None:
        """All steps that are left. Raises StoppedEarly after saving what resumes."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint as if the run had never stopped."""

    @property
    @abstractmethod
    def place(self) -> Cursor:
        """The cursor of the training data."""

    @property
    @abstractmethod
    def data_state(self) -> dict[str, Any]:
        """What the manifest says of the data beside the cursor; `fingerprint` among it."""

    @abstractmethod
    def state(self) -> State:
        """Everything beside model and optimizer that the next step depends on, `loop_state` among it as "loop"."""

    @property
    def loop_state(self) -> dict[str, Any]:
        return {"step": self.step, "skipped_in_row": self.skipped_in_row, "skipped_in_all": self.skipped_in_all}

    @property
    def saved(self) -> bool:
        """Whether the newest checkpoint holds all that there is."""
        return self._parts.saver.newest == self.step

    @property
    def eval_due(self) -> bool:
        every = self._config.eval.every
        return bool(every) and self.step % every == 0 and self.step < self.steps

    def count_skipped(self, why: str) -> None:
        """Note an update that was left out because something was not finite, and stop where the settings say so."""
        self.skipped_in_row += 1
        self.skipped_in_all += 1
        self.run.console.warn(f"{why}; the update was skipped")
        limit = self._config.train.max_nonfinite
        if self._config.train.on_nonfinite == "stop" or self.skipped_in_row >= limit:
            told = f"{why}. {self.skipped_in_row} in a row, train.max_nonfinite={limit}"
            self.save_last()
            if self.unsaved:
                raise RunError(f"{told}; {self.unsaved}")
            raise RunError(f"{told}; the run can be resumed with `msrl resume --ckpt {self.run.path}`")

    def save_if_due(self) -> None:
        every = self._config.checkpoint.every
        with self.clock.stage("save"):
            self._parts.saver.poll()
            if every and self.step % every == 0 and self.step < self.steps:
                self._parts.saver.try_save(self.manifest(), self.state())

    def save(self) -> None:
        """Write a checkpoint of everything a resumed run needs, and wait until it is on disk."""
        try:
            self._parts.saver.save(self.manifest(), self.state())
            self._parts.saver.wait()
        except WorkerLost:
            raise
        except MsrlError as error:  # a folder that was made read-only meanwhile is no wrong input
            raise RunError(f"the checkpoint of step {self.step} was not saved: {error}") from error

    def save_last(self) -> None:
        """`save` where the run ends. A failure is kept in `unsaved`, so that neither the trained model nor why it ends is lost over it."""
        try:
            self.save()
        except WorkerLost:
            raise
        except RunError as error:
            self.unsaved = str(error)

    def stop_if_asked(self) -> None:
        reason = self._parts.stopper.reason
        if reason is not None and self.step < self.steps:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Save and end the run early, resumable."""
        self._parts.saver.settle()
        if not self.saved:
            self.save()
        raise StoppedEarly(f"stopped after step {self.step} of {self.steps} ({reason}); go on with: msrl resume --ckpt {self.run.path}")

    def manifest(self) -> Manifest:
        return Manifest(
            kind=self.kind,
            step=self.step,
            consumed=self.place.taken,
            config=to_dict(self._config),
            versions=versions(),
            layout={**asdict(self._config.parallel), "data": self._parts.trainer.data_parallel},
            model=self._parts.model,
            data={"cursor": self.place.state(), **self.data_state},
            metrics=dict(self.newest),  # a copy: the manifest may be written while later steps go on
            optimizer=self._config.checkpoint.save_optimizer,
        )

    def restore_loop(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load model and optimizer and take over the counts; returns the saved loop state."""
        self._parts.trainer.what = "loading the checkpoint"
        self._parts.trainer.load(checkpoint.path / MODEL)
        loop, _ = read_state(checkpoint.path, "loop")
        self.step = self._parts.saver.newest = loop["step"]
        self.skipped_in_row, self.skipped_in_all = loop["skipped_in_row"], loop["skipped_in_all"]
        return loop

    def restored_cursor(self, checkpoint: Checkpoint) -> Cursor:
        """The saved place in the data; where the data is another, its beginning."""
        saved = checkpoint.manifest.data
        return Cursor.restore(saved["cursor"], self.place.n_rows) if saved["fingerprint"] == self.data_state["fingerprint"] else self.place
