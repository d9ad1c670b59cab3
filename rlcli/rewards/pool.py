"""A pool of processes that judge answers. A stuck or dead process is replaced, and only the answer it was at is lost, counted as such."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rlcli.config.schema import RewardConfig
from rlcli.errors import RunError, UserError
from rlcli.rewards.process import WorkerProcess
from rlcli.rewards.verifiers import check_names
from rlcli.types import Verdict

logger = logging.getLogger(__name__)

MOST_CHUNK = 16  # answers sent to a worker at once
MOST_FAILED_STARTS = 3  # in a row
ENDING_S = 1.0  # seconds that a process may take from closing its socket to its end


@dataclass(slots=True)
class Item:
    """One response to judge: its text, the right answer, and the row's other columns."""

    text: str
    truth: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Items submitted together; it goes to `sink` when the last is judged."""

    key: Hashable
    verdicts: list[Verdict | None]
    replies: list[dict[str, Any]]  # what the worker said besides, where an explanation was asked for
    missing: int
    sink: queue.SimpleQueue[Batch | None]
    explain: bool


@dataclass(slots=True)
class Task:
    batch: Batch
    index: int
    item: Item


class RewardPool:
    """Judges answers in processes that can be killed.

        with RewardPool(config.reward) as pool:
            verdicts = pool.judge([Item(text, truth)])

    `judge` waits for its items; `submit` and `poll` do not, so that groups are judged while others are still generated.
    Entering waits until the workers have imported their verifiers. counts: verdicts by reason since then; restarts: workers replaced.
    Errors on entering: UserError for a verifier that cannot be used. Later: RunError when workers can no longer be started.
    """

    def __init__(self, config: RewardConfig) -> None:
        check_names(config.verifiers, config.weights, config.options)
        self.config = config
        self.counts: Counter[str] = Counter()
        self.restarts = 0
        self.last_crash = ""
        self._tasks: deque[Task] = deque()
        self._lock = threading.Condition()
        self._done: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._closed = False
        self._wrong_score = 0.0
        self._workers: dict[int, WorkerProcess] = {}
        self._threads = [threading.Thread(target=self._run, args=(slot,), daemon=True, name=f"reward-{slot}") for slot in range(config.workers)]

    def __enter__(self) -> RewardPool:
        for thread in self._threads:
            thread.start()
        try:
            for _ in self._threads:
                error = self._started.get()
                if error is not None:
                    raise error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """Verdicts of these items, in order."""
        sink: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._put(None, items, sink)
        return self._verdicts(self._take(sink, None))

    def explain(self, item: Item) -> tuple[Verdict, dict[str, Any]]:
        """A verdict, and how it came about: "seconds", "crashed" (the error), "parts" (for each verifier its own verdict and both sides as compared)."""
        sink: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._put(None, [item], sink, explain=True)
        batch = self._take(sink, None)
        return self._verdicts(batch)[0], batch.replies[0]

    def submit(self, key: Hashable, items: Sequence[Item]) -> None:
        """Have these items judged; `poll` gives their verdicts with this key."""
        self._put(key, items, self._done)

    def poll(self, timeout: float) -> list[tuple[Any, list[Verdict]]]:
        """All submissions judged by now; where there are none, wait up to `timeout` seconds for the first."""
        finished: list[tuple[Any, list[Verdict]]] = []
        with contextlib.suppress(queue.Empty):
            batch = self._take(self._done, timeout)
            while True:
                finished.append((batch.key, self._verdicts(batch)))
                batch = self._take(self._done, 0.0)
        return finished

    def close(self) -> None:
        """End all workers. What is not judged yet never will be."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.interrupt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _put(self, key: Hashable, items: Sequence[Item], sink: queue.SimpleQueue[Batch | None], explain: bool = False) -> None:
        batch = Batch(key, [None] * len(items), [{} for _ in items], len(items), sink, explain)
        if not items:
            sink.put(batch)
            return
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._tasks.extend(Task(batch, index, item) for index, item in enumerate(items))
            self._lock.notify_all()

    def _take(self, sink: queue.SimpleQueue[Batch | None], timeout: float | None) -> Batch:
        """The next finished batch. Errors: queue.Empty after `timeout`, and the pool's own failure."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._failure is not None:
                raise self._failure
            wait = 1.0 if deadline is None else min(max(deadline - time.monotonic(), 0.0), 1.0)
            try:
                batch = sink.get(timeout=wait) if wait else sink.get_nowait()
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                if self._closed and self._failure is None:
                    raise RuntimeError("the reward pool is closed") from None
                continue
            if batch is not None:
                return batch

    @staticmethod
    def _verdicts(batch: Batch) -> list[Verdict]:
        return [verdict for verdict in batch.verdicts if verdict is not None]

    # What follows runs in the pool's threads, one for each worker. A worker is started by its own thread, since the kernel ends it with that.

    def _run(self, slot: int) -> None:
        try:
            self._start(slot)
        except Exception as error:
            self._started.put(error)
            return
        self._started.put(None)
        try:
            while tasks := self._next_chunk():
                while tasks and not self._closed:
                    if not self._workers[slot].idle():
                        self._workers[slot].end()
                        self._start(slot)
                        self.restarts += 1
                    tasks = self._serve(self._workers[slot], tasks)
        except Exception as error:
            self._failure = error
            self._done.put(None)
        finally:
            self._workers[slot].end()

    def _start(self, slot: int) -> None:
        """Start a worker and wait until it is ready. Errors: UserError for a verifier that cannot be used, RunError where none will start."""
        reason = ""
        for _ in range(MOST_FAILED_STARTS):
            try:
                worker = self._workers[slot] = WorkerProcess(self.config)
            except OSError as error:  # no memory, too many processes
                reason = str(error)
                continue
            try:
                message = worker.ready()
            except (EOFError, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}, {ending(worker.end(0.0 if self._closed else ENDING_S))}"
                if self._closed:
                    break
                continue
            if "error" in message:
                worker.end()
                raise UserError(message["error"])
            self._wrong_score = message["wrong_score"]
            return
        raise RunError(f"reward worker {slot} does not start: {reason}")

    def _next_chunk(self) -> list[Task]:
        """The next few tasks, or none once the pool is closed."""
        with self._lock:
            while not self._tasks and not self._closed:
                self._lock.wait()
            if self._closed:
                return []
            share = -(-len(self._tasks) // len(self._threads))
            return [self._tasks.popleft() for _ in range(min(share, MOST_CHUNK))]

    def _serve(self, worker: WorkerProcess, tasks: list[Task]) -> list[Task]:
        """Have a worker judge these tasks. Returns those it did not come to, where it ended before."""
        done = 0
        try:
            worker.send([[task.item.text, task.item.truth, task.item.extra, task.batch.explain] for task in tasks])
            for task in tasks:
                reply = worker.receive()
                self._finish(task, self._read(reply), reply)
                done += 1
                if reply.get("spent"):
                    worker.end()
                    break
        except (EOFError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            status = worker.end(ENDING_S if isinstance(error, EOFError) and not self._closed else 0.0)
            if not self._closed:
                reason = "timeout" if status == -signal.SIGALRM or isinstance(error, TimeoutError) else "crashed"
                self._finish(tasks[done], self._lost(reason, f"its process ended by {ending(status)}"), {})
                done += 1
        return tasks[done:]

    def _read(self, reply: dict[str, Any]) -> Verdict:
        if "crashed" in reply:
            return self._lost("crashed", reply["crashed"])
        score, correct, answer, reason = reply["verdict"]
        return Verdict(score, correct, answer, reason)

    def _lost(self, reason: str, detail: str) -> Verdict:
        """The verdict on an answer whose judgement was lost: it scores as a wrong one, and its reason is counted. The first crash is logged."""
        if reason == "crashed":
            if not self.last_crash:
                logger.warning("a verifier crashed on an answer (counted as crashed, scored as wrong): %s", detail)
            self.last_crash = detail
        return Verdict(self._wrong_score, False, None, reason)

    def _finish(self, task: Task, verdict: Verdict, reply: dict[str, Any]) -> None:
        with self._lock:
            self.counts[verdict.reason] += 1
            task.batch.verdicts[task.index] = verdict
            task.batch.replies[task.index] = reply if task.batch.explain else {}
            task.batch.missing -= 1
            if task.batch.missing == 0:
                task.batch.sink.put(task.batch)


def ending(status: int) -> str:
    """An exit status in words."""
    return f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
