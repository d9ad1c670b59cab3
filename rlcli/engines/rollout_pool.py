"""All rollout engines as one, for the driver: prompts are spread over them, and come back as they finish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcli.cluster.launch import LocalCluster
from rlcli.cluster.supervise import Worker, fetch, wait_all, wait_next
from rlcli.engines.base import Request, Sampling, WeightHandle
from rlcli.engines.rollout import LIFE, RolloutStats, RolloutWorker
from rlcli.engines.rollout_setup import RolloutSetup
from rlcli.engines.weights import WeightTransport
from rlcli.errors import MsrlError
from rlcli.types import FloatArray, Int32Array, Sample

CLOSE_SECONDS = 20.0
ABORT_SECONDS = 60.0
SPARE_CALLS = 64


class RolloutPool:
    """Implements `engines.base.RolloutEngine` over Ray actors.

    `what` is the step and stage that messages name; the trainer sets it. In deterministic mode the prompts of a call are dealt to the
    engines in turn and run as one wave, and the answers come in the order of the requests.
    """

    def __init__(self, cluster: LocalCluster, workers: list[Worker], setup: RolloutSetup, transport: WeightTransport, timeout_s: float, deterministic: bool) -> None:
        self.cluster, self.workers, self.setup, self.transport = cluster, workers, setup, transport
        self.timeout_s, self.deterministic = timeout_s, deterministic
        self.what = "start"
        self._starting: list[tuple[Worker, Any]] = []

    @classmethod
    def launch(
        cls,
        cluster: LocalCluster,
        setup: RolloutSetup,
        envs: Sequence[dict[str, str]],
        logs: Sequence[Path],
        transport: WeightTransport,
        timeout_s: float,
        deterministic: bool = False,
    ) -> RolloutPool:
        """Begin to start one engine for each environment; `ready` waits for them, so that other workers can start meanwhile."""
        import ray

        actor_class: Any = ray.remote(concurrency_groups={LIFE: 1})(RolloutWorker)  # type: ignore[call-overload]
        workers = []
        for number, (env, log) in enumerate(zip(envs, logs, strict=True)):
            options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "runtime_env": {"env_vars": env}}
            options["max_concurrency"] = most_prompts(setup, 1) + SPARE_CALLS  # else `abort` would wait behind the prompts
            workers.append(Worker(f"rollout engine {number}", actor_class.options(**options).remote(setup, str(log)), log))
        pool = cls(cluster, workers, setup, transport, timeout_s, deterministic)
        identities = wait_all([(worker, worker.actor.identity.remote()) for worker in workers], "start", timeout_s)
        for worker, (process, _) in zip(workers, identities, strict=True):
            worker.process = process
        cluster.adopt(workers)
        pool._starting = [(worker, worker.actor.start.remote()) for worker in workers]
        return pool

    def ready(self, timeout_s: float) -> list[float]:
        """Wait until every engine can generate; the seconds each took to load."""
        starting, self._starting = self._starting, []
        return wait_all(starting, "starting the rollout engines", timeout_s)

    def generate(self, requests: Iterable[Request], sampling: Sampling, stop: Callable[[], bool] | None = None) -> Iterator[tuple[int, list[Sample]]]:
        """Yield (key, samples) of each prompt as soon as all its samples are finished; when `stop()` is true the rest is aborted."""
        if self.deterministic:
            yield from self._waves(list(requests), sampling)
            return
        deadline = time.monotonic() + self.timeout_s
        waiting = iter(requests)
        pending: dict[Any, Worker] = {}
        keys: dict[Any, tuple[int, int]] = {}
        loads = dict.fromkeys(range(len(self.workers)), 0)
        try:
            while stop is None or not stop():
                for request, number in self._deal(waiting, loads, sampling):
                    worker = self.workers[number]
                    reference = worker.actor.sample.remote(request, sampling)
                    pending[reference], keys[reference] = worker, (request.key, number)
                if not pending:
                    return
                reference = wait_next(pending, self.what, deadline, self.cluster.pulse)
                worker, (key, number) = pending.pop(reference), keys.pop(reference)
                loads[number] -= 1
                yield key, fetch(reference, worker, pending, self.what)
        except MsrlError:
            pending.clear()  # the run ends here: nothing to wait for
            raise
        finally:
            self._abort(pending)

    def _deal(self, waiting: Iterator[Request], loads: dict[int, int], sampling: Sampling) -> Iterator[tuple[Request, int]]:
        """The next prompts and the least loaded engine for each, as long as that has less than two batches before it."""
        most = most_prompts(self.setup, sampling.samples)
        while min(loads.values()) < most:
            request = next(waiting, None)
            if request is None:
                return
            number = min(loads, key=lambda engine: loads[engine])
            loads[number] += 1
            yield request, number

    def _abort(self, pending: dict[Any, Worker]) -> None:
        """Cut off what still runs, and wait until it has ended, so that new weights find the engines idle."""
        if not pending:
            return
        deadline = time.monotonic() + ABORT_SECONDS
        wait_all([(worker, worker.actor.abort.remote()) for worker in dict.fromkeys(pending.values())], f"{self.what}, abort", ABORT_SECONDS, self.cluster.pulse)
        while pending:
            pending.pop(wait_next(pending, f"{self.what}, abort", deadline, self.cluster.pulse))

    def _waves(self, requests: list[Request], sampling: Sampling) -> Iterator[tuple[int, list[Sample]]]:
        shares = [requests[number :: len(self.workers)] for number in range(len(self.workers))]
        calls = [(worker, worker.actor.wave.remote(share, sampling)) for worker, share in zip(self.workers, shares, strict=True) if share]
        found = dict(answer for answers in self._wait(calls) for answer in answers)
        yield from ((request.key, found[request.key]) for request in requests)

    def score(self, sequences: Sequence[tuple[Int32Array, Int32Array]], temperature: float = 1.0) -> list[FloatArray]:
        """Log-probs of each second part's tokens after the first, by the first engine."""
        return self.score_each(sequences, temperature)[0]

    def score_each(self, sequences: Sequence[tuple[Int32Array, Int32Array]], temperature: float = 1.0) -> list[list[FloatArray]]:
        """The same by every engine: they must agree."""
        return self._all("score", list(sequences), temperature)

    def update_weights(self, handle: WeightHandle) -> None:
        """All engines take the weights; then the published ones go."""
        self._all("update_weights", handle)
        self.transport.release(handle.version)

    def stats(self) -> list[RolloutStats]:
        return self._all("stats")

    def close(self) -> None:
        """End the engines and all their processes. Never raises."""
        with contextlib.suppress(Exception):  # a dead engine has nothing to close; kill ends what is left
            wait_all([(worker, worker.actor.close.remote()) for worker in self.workers], "closing the rollout engines", CLOSE_SECONDS)
        for worker in self.workers:
            worker.kill()
        self.transport.close()

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._wait([(worker, getattr(worker.actor, method).remote(*args)) for worker in self.workers])

    def _wait(self, calls: list[tuple[Worker, Any]]) -> list[Any]:
        return wait_all(calls, self.what, self.timeout_s, self.cluster.pulse)


def most_prompts(setup: RolloutSetup, samples: int) -> int:
    """Prompts that one engine is given at once: two batches' worth, so that it never runs dry."""
    return 2 * setup.max_running_samples // samples + 2
