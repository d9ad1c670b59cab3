"""Encoding by several processes, in order: what comes out is the same for every number of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rlcli.data.rows import BadRow, Row
from rlcli.data.tokens import Encoded, Encoder, one_thread
from rlcli.errors import RunError

CHUNK = 256  # rows a task; fixed, so that no result depends on the number of processes

_encoder: Encoder | None = None  # of this worker process


class EncodePool:
    """Encodes chunks of rows with `workers` processes (1: in this one). Use as a context manager.

    `busy_s` is the time that all workers together spent encoding.
    """

    def __init__(self, encoder: Encoder, kind: str, workers: int) -> None:
        self.busy_s = 0.0
        self._encoder, self._kind, self._workers = encoder, kind, workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._pool is None:
            return
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            for process in processes:
                process.kill()
                process.join()

    def map(self, chunks: Iterator[list[Row]]) -> Iterator[tuple[list[Row], list[Encoded | BadRow]]]:
        """Each chunk with its results, in order; at most two chunks a worker are under way."""
        if self._workers == 1:
            with one_thread():
                for chunk in chunks:
                    begin = time.perf_counter()
                    done = self._encoder.encode(chunk, self._kind)
                    self.busy_s += time.perf_counter() - begin
                    yield chunk, done
            return
        under_way: deque[tuple[list[Row], Future[tuple[list[Encoded | BadRow], float]]]] = deque()
        for chunk in chunks:
            under_way.append((chunk, self._start().submit(_encode, chunk, self._kind)))
            if len(under_way) >= 2 * self._workers:
                yield self._result(*under_way.popleft())
        while under_way:
            yield self._result(*under_way.popleft())

    def _result(self, chunk: list[Row], future: Future[tuple[list[Encoded | BadRow], float]]) -> tuple[list[Row], list[Encoded | BadRow]]:
        try:
            done, seconds = future.result()
        except BrokenProcessPool as error:
            raise RunError("a worker process of the preparation died (killed, or out of memory?); nothing was written. Try fewer --workers") from error
        self.busy_s += seconds
        return chunk, done

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_begin, initargs=(self._encoder,))
        return self._pool


def _begin(encoder: Encoder) -> None:
    """Take over the encoder. It comes pickled, not loaded anew: that spares each worker the import of torch.

    The worker leaves Ctrl-C to the parent, and ends when the parent is gone.
    """
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(chunk: list[Row], kind: str) -> tuple[list[Encoded | BadRow], float]:
    assert _encoder is not None
    begin = time.perf_counter()
    return _encoder.encode(chunk, kind), time.perf_counter() - begin
