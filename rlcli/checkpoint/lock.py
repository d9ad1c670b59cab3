"""One writer a folder: a lock file that says who holds it and that outlives nobody."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

import psutil

from rlcli.checkpoint import disk
from rlcli.errors import UserError

NAME = ".lock"


class FolderLock:
    """Held from `take` to `give_back`, or to the end of the process.

    The system's own lock (flock) decides on one machine. What the file says decides where that does not reach: on shared file systems, and
    after a crash. Left over by a process that is gone, or copied along with the folder, it is taken over.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Raises UserError, naming the holder, where another run writes to the folder."""
        if self._file is not None:
            return
        try:
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            raise disk.explained(f"checkpoint: cannot make the lock file {self.path}", self.path, error) from error
        try:
            free = _flock(file)
            file.seek(0)
            holder = _parse(file.read())
            if not free or self._alive(holder, file):
                raise UserError(self._refusal(holder))
            file.seek(0)
            file.truncate()
            json.dump(self._own(file), file)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def give_back(self) -> None:
        """Let others write; no harm where it is not held. The file stays, empty: removing it could take it from under who just opened it."""
        if self._file is not None:
            self._file.truncate(0)
            self.forget()

    def forget(self) -> None:
        """Close the file and leave it lying, as the end of the process would."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _own(self, file: IO[str]) -> dict[str, Any]:
        started = psutil.Process().create_time()
        return {"pid": os.getpid(), "started": started, "host": socket.gethostname(), "inode": os.fstat(file.fileno()).st_ino}

    def _alive(self, holder: dict[str, Any] | None, file: IO[str]) -> bool:
        """Whether the process that wrote the file may still be at work on this very folder."""
        if holder is None or holder.get("inode") != os.fstat(file.fileno()).st_ino:
            return False  # empty, torn, or a copy
        if holder.get("host") != socket.gethostname():
            return True  # on another machine: nothing here can tell
        if holder.get("pid") == os.getpid():
            return False  # this process would have failed at flock
        try:
            return abs(psutil.Process(int(holder["pid"])).create_time() - float(holder["started"])) < 1.0
        except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
            return False

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        who = "another run"
        if holder is not None:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(holder.get("started", 0))))
            who = f"process {holder.get('pid')} on {holder.get('host')}, started {since},"
        return f"{self.path.parent}: {who} writes checkpoints here; stop it, use another run.name, or, if it is gone for certain, remove {self.path}"


def _flock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: the content decides
    return True


def _parse(text: str) -> dict[str, Any] | None:
    try:
        holder = json.loads(text)
    except ValueError:
        return None
    return holder if isinstance(holder, dict) else None
