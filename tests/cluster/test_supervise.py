"""Real Ray actors that die, hang, fail or dawdle: each is named, in time, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.cluster import guardian
from rlcli.cluster.launch import FOLDER_PREFIX, LocalCluster, sweep_leftovers
from rlcli.cluster.processes import STOP_SIGNALS, ProcessId
from rlcli.cluster.supervise import last_words
from rlcli.errors import RunError, UserError, WorkerLost

pytestmark = pytest.mark.engine

MODULE = f"{Path(__file__).stem}:Subject"
ENV = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])}


class Subject:
    """What the host actors house in these tests."""

    def say(self, text: str) -> int:
        print(text, flush=True)
        return os.getpid()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, kind: str) -> None:
        print("about to fail", flush=True)
        raise {"user": UserError, "value": ValueError}[kind]("it went wrong\nsecond line")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus=8, heartbeat_s=3.0) as up:
        yield up
        family = list(up._family)
    assert not [process for process in family[1:] if process.alive()]
    assert not up.folder.exists()


@pytest.fixture
def pair(cluster: LocalCluster, tmp_path: Path) -> Iterator[list]:
    names = ["train rank 0", "train rank 1"]
    workers = cluster.spawn(names, [tmp_path / f"{name}.log" for name in names], [ENV, ENV], cpus=0.5, timeout_s=60)
    cluster.call(workers, "build", MODULE, what="start", timeout_s=60)
    yield workers
    for worker in workers:
        worker.kill()
    cluster.pulse.forget()
    cluster.workers.clear()


def test_calls_answer_in_the_order_of_the_workers(cluster: LocalCluster, pair: list) -> None:
    pids = cluster.call(pair, "call", "say", "hello", what="greeting", timeout_s=30)
    assert pids == [worker.process.pid for worker in pair]
    assert "hello" in last_words(pair[1].log)


def test_a_killed_worker_is_named_with_its_last_words(cluster: LocalCluster, pair: list) -> None:
    cluster.call(pair, "call", "say", "my last words", what="greeting", timeout_s=30)
    calls = [(worker, worker.actor.call.remote("sleep", 60.0)) for worker in pair]
    os.kill(pair[1].process.pid, signal.SIGKILL)
    from rlcli.cluster.supervise import wait_all

    with pytest.raises(WorkerLost) as caught:
        wait_all(calls, "step 7, update", 50.0, cluster.pulse)
    text = str(caught.value)
    assert text.startswith("step 7, update: train rank 1 died")
    assert "my last words" in text


def test_a_frozen_worker_is_found_by_its_silence(cluster: LocalCluster, pair: list) -> None:
    os.kill(pair[0].process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLost, match=r"step 2, update: train rank 0 gives no sign of life for 3 s"):
            cluster.call(pair, "call", "sleep", 0.1, what="step 2, update", timeout_s=60)
    finally:
        os.kill(pair[0].process.pid, signal.SIGCONT)


def test_a_worker_that_is_late_is_named(cluster: LocalCluster, pair: list) -> None:
    with pytest.raises(WorkerLost, match=r"step 4, save: train rank 0 did not finish in time .*train rank 0, train rank 1"):
        cluster.call(pair, "call", "sleep", 20.0, what="step 4, save", timeout_s=2.0)


def test_a_users_mistake_found_by_a_worker_stays_one(cluster: LocalCluster, pair: list) -> None:
    with pytest.raises(UserError, match="it went wrong"):
        cluster.call(pair, "call", "fail", "user", what="start", timeout_s=30)


def test_any_other_error_names_worker_and_stage(cluster: LocalCluster, pair: list) -> None:
    with pytest.raises(RunError, match=r"step 1, update: train rank \d failed: ValueError: it went wrong") as caught:
        cluster.call(pair, "call", "fail", "value", what="step 1, update", timeout_s=30)
    assert not isinstance(caught.value, WorkerLost)  # it goes on after a call that failed


DRIVER = """
import json, sys, time
from pathlib import Path
from rlcli.cluster.launch import LocalCluster
if __name__ == "__main__":
    up = LocalCluster(2, 3.0).__enter__()
    up.spawn(["w"], [Path(sys.argv[1]) / "w.log"], [{}], 0.5, 60)
    print(json.dumps([str(up.folder), [[p.pid, p.started] for p in up._family[1:]]]), flush=True)
    time.sleep(300)
"""


def test_kill_9_of_the_driver_leaves_no_process_and_the_next_start_removes_its_folder(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    driver = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, env=env, text=True)
    assert driver.stdout is not None
    line = next(text for text in driver.stdout if text.startswith("["))
    folder, pairs = json.loads(line)
    family = [ProcessId(*pair) for pair in pairs]
    assert len([process for process in family if process.alive()]) >= 3  # gcs, raylet, worker
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(process.alive() for process in family):
        time.sleep(0.2)
    assert not [process for process in family if process.alive()]
    assert Path(folder).name.startswith(FOLDER_PREFIX)
    sweep_leftovers()
    assert not Path(folder).exists()


HOLDER = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(300)
"""


def test_what_killed_processes_held_in_shared_memory_is_cleared_up(tmp_path: Path) -> None:
    env = {**os.environ, guardian.MARK: str(tmp_path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=env, text=True)
    assert holder.stdout is not None
    held = Path("/dev/shm") / f"sem.{holder.stdout.readline().strip().lstrip('/')}"
    assert held.exists()
    family = [ProcessId.own(), ProcessId.of(holder.pid)]
    helpers = family[1].tree()[1:]
    (tmp_path / guardian.RECORD).write_text(json.dumps([(process.pid, process.started) for process in family]))
    guardian.end_family(tmp_path)
    holder.wait()
    assert len(helpers) == 1
    assert not any(process.alive() for process in helpers)
    assert not held.exists()
    assert not tmp_path.exists()


def deaf_to(pid: int) -> set[int]:
    """The signals that a process blocks or ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = {name: int(value, 16) for name, _, value in (line.partition(":") for line in lines) if name in ("SigBlk", "SigIgn")}
    return {number for number in range(1, 65) if (masks["SigBlk"] | masks["SigIgn"]) >> (number - 1) & 1}


def test_signals_for_the_driver_reach_nobody_else(cluster: LocalCluster, pair: list) -> None:
    """Neither by its group and session, nor where every process of a run is asked."""
    others = [process.pid for process in cluster._family[1:] if process.alive()]
    assert {worker.process.pid for worker in pair} < set(others)
    assert not [pid for pid in others if os.getsid(pid) == os.getsid(0)]
    assert not [pid for pid in others if not set(STOP_SIGNALS) <= deaf_to(pid)]
    for worker in pair:  # also where something opens the mask again, as multiprocessing does
        os.kill(worker.process.pid, signal.SIGTERM)
    assert cluster.call(pair, "call", "say", "still here", what="greeting", timeout_s=30) == [worker.process.pid for worker in pair]


def test_the_token_and_the_folder_are_the_owners_alone(cluster: LocalCluster) -> None:
    assert cluster.folder.stat().st_mode & 0o777 == 0o700
    assert (cluster.folder / "token").stat().st_mode & 0o777 == 0o600
    assert os.environ["RAY_AUTH_MODE"] == "token"
