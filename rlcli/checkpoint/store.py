"""The checkpoints of a run: written beside, seen to the disk, renamed, and only then are older ones pruned.

    checkpoints/
      step-00000040/            complete: a folder of this name, with a manifest that holds
        manifest.json
        ...                     whatever the run put there before `finish`
      .partial-step-00000060/   being written
      .lock                     who writes here

A crash at any instant leaves the newest complete checkpoint as it was. What it leaves half-done begins with a dot, and goes when the folder
is next opened for writing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rlcli.checkpoint import disk
from rlcli.checkpoint.find import Checkpoint, complete, newest_good
from rlcli.checkpoint.lock import FolderLock
from rlcli.checkpoint.manifest import NAME, FileEntry, Manifest, encode
from rlcli.errors import MsrlError, RunError

LEFTOVER = re.compile(r"\.(partial|trash)-")


class Store:
    """Writes the checkpoints of one run, by one process at a time.

    keep_last: newest ones kept. keep_every: those whose step is a multiple are kept for good; 0: none.
    keep_best: metric of `Manifest.metrics` whose best checkpoint is kept too: the largest, or with a leading "-" the smallest.
    say: gets one line where something is worth telling.
    """

    def __init__(
        self, folder: Path, keep_last: int = 2, keep_every: int = 0, keep_best: str | None = None, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.folder, self.keep_last, self.keep_every, self.keep_best, self.say = Path(folder), keep_last, keep_every, keep_best, say
        self._lock = FolderLock(self.folder)
        self._worker: ThreadPoolExecutor | None = None
        self._writing: Future[Checkpoint] | None = None

    # ---------------------------------------------------------------- opening

    def open(self) -> Store:
        """Make the folder, be its only writer, clear away what a crash left. Raises UserError where that cannot be."""
        disk.make_folder(self.folder)
        self._lock.take()
        for path in self.folder.iterdir():
            if LEFTOVER.match(path.name) and path.is_dir():
                disk.delete_folder(path)
        return self

    def close(self) -> None:
        """Wait for what is being written, and let others write. Raises what the writing raised."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None
            self._lock.give_back()

    def __enter__(self) -> Store:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except MsrlError as late:
            if error is None:
                raise
            self.say(f"a checkpoint was not saved: {late}")  # what ended the run is the error to report

    # ---------------------------------------------------------------- writing

    def begin(self, step: int) -> Path:
        """A fresh empty folder to write the checkpoint of `step` into; call `abandon` where that fails.

        Raises RunError where the disk has no room for one like the last, and what went wrong with the one before (`finish_later`).
        """
        self.wait()
        self._check_room()
        partial = self._partial(step)
        if partial.exists():
            disk.delete_folder(partial)
        disk.make_folder(partial)
        return partial

    def finish(self, step: int, manifest: Manifest) -> Checkpoint:
        """Make what lies in the folder of `begin` a complete checkpoint, then prune.

        On an error the half-written folder is removed, and all that was complete before still is.
        """
        partial = self._partial(step)
        try:
            with disk.named("complete", partial):
                checkpoint = self._complete(partial, manifest)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.prune()
        return checkpoint

    def finish_later(self, step: int, manifest: Manifest) -> None:
        """`finish` on a thread of its own; `wait` and the next `begin` raise what went wrong."""
        self.wait()
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._worker.submit(self.finish, step, manifest)

    def wait(self) -> None:
        """Return when nothing is being written. Raises what the writing raised, once."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @property
    def busy(self) -> bool:
        """Whether `finish_later` is still at work."""
        return self._writing is not None and not self._writing.done()

    def abandon(self, step: int) -> None:
        """Throw away what was begun for `step`."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _complete(self, partial: Path, manifest: Manifest) -> Checkpoint:
        files = disk.files_in(partial)
        sealed = disk.seal_files(files)
        manifest.files = {path.relative_to(partial).as_posix(): FileEntry(*seal) for path, seal in zip(files, sealed, strict=True)}
        manifest.sequence = 1 + max((known.manifest.sequence for known in complete(self.folder)), default=0)
        disk.write_file(partial / NAME, encode(manifest))
        for folder in sorted({path.parent for path in files} | {partial}):
            disk.sync_folder(folder)
        final = self._free_name(manifest.step)
        disk.rename(partial, final)
        disk.sync_folder(self.folder)
        return Checkpoint(final, manifest)

    def _check_room(self) -> None:
        """A save that is bound to fail should fail before it is written."""
        known = complete(self.folder)
        if not known:
            return
        need, free = known[-1].manifest.bytes(), shutil.disk_usage(self.folder).free
        if free < need:
            raise RunError(
                f"checkpoint: {self.folder} has {free / 2**30:.2f} GiB free, and {known[-1].path.name} took {need / 2**30:.2f} GiB; "
                "free some space, or lower checkpoint.keep_last"
            )

    # ---------------------------------------------------------------- reading and pruning

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint whose checksums hold; says which newer ones are damaged. None where there is none."""
        return newest_good(self.folder, self.say)

    def prune(self) -> None:
        """Remove complete checkpoints that no rule keeps. A failure is told and costs nothing but space."""
        known = complete(self.folder)
        keep = {checkpoint.path for checkpoint in known[-self.keep_last :]}
        if self.keep_every:
            keep |= {checkpoint.path for checkpoint in known if checkpoint.step % self.keep_every == 0}
        if best := best_of(known, self.keep_best):
            keep.add(best.path)
        for checkpoint in known:
            if checkpoint.path not in keep:
                self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        trash = self.folder / f".trash-{path.name}"
        try:
            disk.rename(path, trash)
            disk.delete_folder(trash)
        except MsrlError as error:
            self.say(f"an old checkpoint could not be removed: {error}")

    def _partial(self, step: int) -> Path:
        return self.folder / f".partial-step-{step:08d}"

    def _free_name(self, step: int) -> Path:
        """step-NNNNNNNN; with .2, .3 ... where a step is saved again, as after going back to an older checkpoint."""
        path, attempt = self.folder / f"step-{step:08d}", 1
        while path.exists():
            attempt += 1
            path = self.folder / f"step-{step:08d}.{attempt}"
        return path


def best_of(checkpoints: list[Checkpoint], metric: str | None) -> Checkpoint | None:
    """The checkpoint with the largest value of a metric ("-name": the smallest); among equals the newest. None where none has it."""
    if not metric:
        return None
    name, sign = (metric[1:], -1.0) if metric.startswith("-") else (metric, 1.0)
    having = [checkpoint for checkpoint in checkpoints if isinstance(checkpoint.manifest.metrics.get(name), (int, float))]
    return max(having, key=lambda c: (sign * c.manifest.metrics[name], c.manifest.sequence), default=None)
