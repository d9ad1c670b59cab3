"""A private Ray on this machine for one run: token authentication, a folder only its owner can enter, no dashboard, no usage report."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlcli.cluster import guardian
from rlcli.cluster.host import Host
from rlcli.cluster.processes import ProcessId, be_out_of_reach
from rlcli.cluster.supervise import Pulse, Worker, wait_all
from rlcli.errors import RunError

# Ray puts Unix sockets below its folder, whose paths may have 107 characters: it must lie high up.
FOLDER_PREFIX = "msrl-ray-"
RAY_STARTS = 3  # Ray gives its processes 30 seconds, which a machine with other work may not have for them
OBJECT_STORE_BYTES = 256 << 20


def _temporary_root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) < 30 else Path("/tmp")


def sweep_leftovers() -> None:
    """Remove the folders of runs whose driver is gone, and end what of theirs still lives."""
    for folder in _temporary_root().glob(FOLDER_PREFIX + "*"):
        try:
            owner = ProcessId(*json.loads((folder / guardian.RECORD).read_text())[0])
        except (OSError, ValueError, TypeError, IndexError):
            continue
        if not owner.alive():
            guardian.end_family(folder)


class LocalCluster:
    """Context manager: Ray is up inside, and nothing of it is left after."""

    def __init__(self, cpus: int, heartbeat_s: float) -> None:
        self.cpus = cpus
        self.pulse = Pulse(heartbeat_s)
        self.workers: list[Worker] = []
        self._family: list[ProcessId] = [ProcessId.own()]
        self._before: set[int] = set()  # children that the driver had already
        self.folder = Path()
        self._folders: list[str] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        sweep_leftovers()
        self._before = {process.pid for process in ProcessId.own().tree()[1:]}
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_temporary_root()))
        self._record()
        self._guardian = guardian.start(self.folder)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        token = self.folder / "token"
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(_token())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        temporary = self.folder / "t"  # sockets and files of vLLM and others go with the folder
        temporary.mkdir()
        with _environment(TMPDIR=str(temporary), **{guardian.MARK: str(self.folder)}):
            for attempt in range(1, RAY_STARTS + 1):
                try:
                    self._start_ray(self.folder / f"r{attempt}")
                    break
                except Exception as error:
                    self._end_ray()
                    if attempt == RAY_STARTS:
                        atexit.register(_leave_at_once)
                        raise RunError(f"Ray did not start on this machine, in {attempt} attempts: {error}") from error
        self._record()

    def _start_ray(self, folder: Path) -> None:
        """Ray in `folder`, which it opens to everybody; the one around it stays closed."""
        import ray

        with _handlers_kept(), _own_sessions():
            ray.init(
                address="local",
                num_cpus=self.cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
        _silence_ray()

    def _end_ray(self) -> None:
        """Clear away what a start that failed has left."""
        import ray

        spared = {*self._before, os.getpid(), self._guardian.pid if self._guardian else 0}
        family = [process for process in ProcessId.own().tree() if process.pid not in spared]  # before they lose their parents
        with contextlib.suppress(Exception):
            ray.shutdown()
        for process in family:
            process.kill()

    def _record(self) -> None:
        """Write down which processes belong to this run, so that the next start can end them should this one be killed."""
        not_ours = {*self._before, self._guardian.pid if self._guardian else 0}
        known = {process.pid: process for process in [*self._family, *ProcessId.own().tree()] if process.pid not in not_ours}
        self._family = [ProcessId.own(), *(process for pid, process in known.items() if pid != os.getpid())]
        part = self.folder / f"part-{guardian.RECORD}"
        part.write_text(json.dumps([(process.pid, process.started) for process in self._family]))
        os.replace(part, self.folder / guardian.RECORD)

    def spawn(self, names: list[str], logs: list[Path], envs: list[dict[str, str]], cpus: float, timeout_s: float) -> list[Worker]:
        """Start one empty host actor for each name; they are housed by `Host.build` afterwards."""
        import ray

        actor_class: Any = ray.remote(concurrency_groups={"life": 1})(_with_life_group(Host))  # type: ignore[call-overload]
        workers = []
        for name, log, env in zip(names, logs, envs, strict=True):
            options = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "runtime_env": {"env_vars": env}}
            workers.append(Worker(name, actor_class.options(**options).remote(str(log)), log))
        self.workers += workers
        # No pulse yet: a process that still starts cannot answer.
        identities = wait_all([(worker, worker.actor.identity.remote()) for worker in workers], "start", timeout_s)
        for worker, (process, _) in zip(workers, identities, strict=True):
            worker.process = process
        self._record()
        return workers

    def adopt(self, workers: list[Worker]) -> None:
        """Take in actors made elsewhere: they are ended with this cluster, and their processes are written down."""
        self.workers += workers
        self._record()

    def own_folder(self, path: Path) -> None:
        """Remove a folder too when this run ends, even by kill -9 of the driver."""
        self._folders.append(str(path))
        (self.folder / guardian.FOLDERS).write_text(json.dumps(self._folders))

    def call(self, workers: list[Worker], method: str, *args: Any, what: str, timeout_s: float) -> list[Any]:
        """The same method of the host actors themselves, on all of them, with a deadline."""
        calls = [(worker, getattr(worker.actor, method).remote(*args)) for worker in workers]
        return wait_all(calls, what, timeout_s, self.pulse)

    def close(self) -> None:
        """End every worker, Ray and its folder. Never raises; may be called twice."""
        self._record_quietly()
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        import ray

        with contextlib.suppress(Exception):  # what counts is that the processes below are gone
            ray.shutdown()
        guardian.end_family(self.folder)
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def _record_quietly(self) -> None:
        with contextlib.suppress(OSError):
            self._record()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _token() -> str:
    """One a process: Ray reads it once and keeps it, so a second cluster of the same process must go by the same."""
    return secrets.token_hex(32)


def _leave_at_once() -> None:
    """End the process as failed: after a start that failed, Ray's own client may spin for ever while Python takes itself down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray puts a handler of its own over SIGTERM, which prints a stack; a signal is for the run to hear."""
    wanted = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in wanted.items():
                signal.signal(number, handler)


class _OutOfReach(subprocess.Popen):  # type: ignore[type-arg]
    """A process that hears no signal meant for the driver, nor one that would end it gently."""

    def __init__(self, command: list[str], preexec_fn: Callable[[], None], **options: Any) -> None:
        def before_exec() -> None:
            preexec_fn()
            be_out_of_reach()

        super().__init__(command, preexec_fn=before_exec, **options)

    def terminate(self) -> None:
        self.kill()


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Ray starts its processes by this class inside; it has no setting for sessions of their own. Workers are started by them, and inherit both."""
    from ray._private import services

    own = services.ConsolePopen
    setattr(services, "ConsolePopen", _OutOfReach)  # noqa: B010
    try:
        yield
    finally:
        setattr(services, "ConsolePopen", own)  # noqa: B010


def _silence_ray() -> None:
    """Ray prints its own paragraph for each dead worker on the driver's terminal; `supervise` says it in one line, with the name."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _with_life_group(host: type) -> type:
    """Host with `ping` in a concurrency group of its own, so that it answers while a call runs."""
    import ray

    return type("Host", (host,), {"ping": ray.method(concurrency_group="life")(lambda self: True)})
