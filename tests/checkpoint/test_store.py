"""The store: complete or not there, whatever happens in between."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlcli.checkpoint import disk, find, lock, manifest, store
from rlcli.checkpoint.find import resolve, verify
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.state import read_state, write_state
from rlcli.checkpoint.store import Store
from rlcli.errors import RunError, UserError


class Crash(BaseException):
    """The process ends here."""


def fill(folder: Path, step: int) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "weights.bin").write_bytes(bytes([step]) * 5000)
    (folder / "engine" / "empty.bin").write_bytes(b"")
    write_state(folder, "sampler", {"step": step, "acceptance": 0.1 + 0.2}, {"ids": np.arange(step, dtype=np.int32)})


def save(s: Store, step: int, **more):
    fill(s.begin(step), step)
    return s.finish(step, Manifest("dapo", step, **more))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != lock.NAME)


def check(folder: Path, step: int) -> None:
    """The newest checkpoint is that of `step`, with all it held."""
    found = resolve(folder)
    assert (found.step, verify(found.path)) == (step, [])
    assert (found.path / "engine" / "weights.bin").read_bytes() == bytes([step]) * 5000
    values, arrays = read_state(found.path, "sampler")
    assert values == {"step": step, "acceptance": 0.1 + 0.2}
    assert arrays.get("ids", np.empty(0)).tolist() == list(range(step))


def test_save_and_find(tmp_path):
    with Store(tmp_path / "run" / "checkpoints") as s:
        assert s.latest() is None
        done = save(s, 4, consumed=128, metrics={"eval/accuracy": 0.5, "x": float("nan")}, state={"ranks": {0: [1], 10: (2,), 9: []}})
        assert done.path.name == "step-00000004"
    check(tmp_path / "run", 4)
    check(tmp_path / "run" / "checkpoints", 4)
    check(tmp_path / "run" / "checkpoints" / "step-00000004", 4)
    read = resolve(tmp_path / "run").manifest
    assert (read.consumed, read.metrics, read.state) == (128, {"eval/accuracy": 0.5}, {"ranks": {"0": [1], "10": [2], "9": []}})
    assert sorted(read.files) == ["engine/empty.bin", "engine/weights.bin", "sampler.json", "sampler.safetensors"]


def test_keeps_the_last_every_and_the_best(tmp_path):
    accuracy = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.9, 5: 0.3, 6: 0.3, 7: 0.1}
    with Store(tmp_path, keep_last=2, keep_every=3, keep_best="eval/accuracy") as s:
        for step, value in accuracy.items():
            save(s, step, metrics={"eval/accuracy": value})
    # 6 and 7 are the last, 3 and 6 multiples of three, 4 the newer of the best
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000006", "step-00000007"]


def test_best_may_be_the_smallest_and_survives_a_restart(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.9), (4, 0.8)):
        with Store(tmp_path, keep_last=1, keep_best="-loss") as s:  # a new process for every save
            save(s, step, metrics={"loss": loss})
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_keep_one_never_leaves_none(tmp_path, monkeypatch):
    """At the moment anything is removed, the new one is complete."""
    removed = []

    def watch(path):
        removed.append((path.name, resolve(tmp_path).step))
        shutil.rmtree(path)

    with Store(tmp_path, keep_last=1) as s:
        save(s, 1)
        monkeypatch.setattr(disk, "delete_folder", watch)
        save(s, 2)
    assert removed == [(".trash-step-00000001", 2)]


OPERATIONS = ("make_folder", "sync_file", "write_file", "sync_folder", "rename", "delete_folder")


def crash_at(monkeypatch, number: int, how) -> list[str]:
    """Make the file operation of that number end in `how`; returns the list that grows with every operation."""
    seen: list[str] = []
    one_by_one = threading.Lock()

    def step(name, real, *args):
        with one_by_one:
            seen.append(name)
            if len(seen) == number:
                how(name, args)
        return real(*args)

    for name in OPERATIONS:
        monkeypatch.setattr(disk, name, partial(step, name, getattr(disk, name)))
    return seen


@pytest.fixture
def quick_disk(monkeypatch):
    """Without power cuts fsync changes nothing that a test could see, and takes most of its time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_any_file_operation_leaves_the_last_good_one(tmp_path, quick_disk, torn):
    def die(name, args):
        if torn and name == "write_file":
            args[0].write_bytes(args[1][: len(args[1]) // 2])
        if torn and name == "delete_folder":
            next(path for path in args[0].rglob("*") if path.is_file()).unlink()
        raise Crash

    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        with Store(folder, keep_last=1) as s:
            save(s, 1)
            save(s, 2)
        crashed = Store(folder, keep_last=1)
        with pytest.MonkeyPatch.context() as patch:
            seen = crash_at(patch, number, die)
            try:
                crashed.open()
                save(crashed, 3)
            except Crash:
                pass
            else:
                break
            finally:
                crashed._lock.forget()
        check(folder, 3 if "rename" in seen[:-1] else 2)
        with Store(folder, keep_last=1) as again:  # the next process clears up and goes on
            assert not [name for name in names(folder) if name.startswith(".")]
            save(again, 4)
        check(folder, 4)
        assert names(folder) == ["step-00000004"]
    assert number > 12
    assert {"rename", "delete_folder", "sync_file", "write_file", "sync_folder", "make_folder"} == set(seen)


def attempt(s: Store, step: int) -> str | None:
    """Save as a trainer does, which gives up what failed; returns the line of the failure."""
    try:
        save(s, step)
    except RunError as error:
        s.abandon(step)
        return str(error)
    return None


def test_a_full_disk_at_any_operation_is_one_line_and_costs_nothing(tmp_path, quick_disk):
    def full(name, args):
        raise disk.explained(name, Path(str(args[0])), OSError(errno.ENOSPC, "No space left on device"))

    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        with Store(folder, keep_last=1) as s:
            save(s, 1)
            told: list[str] = []
            with pytest.MonkeyPatch.context() as patch:
                crash_at(patch, number, full)
                s.say = told.append
                failure = attempt(s, 2)
            if failure is None and not told:
                break
            for line in [failure] if failure else told:
                assert "the disk is full" in line
                assert "\n" not in line
            assert not [name for name in names(folder) if name.startswith(".partial")]
            check(folder, 1 if failure and resolve(folder).step == 1 else 2)
            save(s, 3)
        check(folder, 3)
    assert number > 8


def test_an_asynchronous_save_reports_its_failure_once_and_the_run_goes_on(tmp_path, monkeypatch):
    with Store(tmp_path) as s:
        save(s, 1)
        fill(s.begin(2), 2)
        with monkeypatch.context() as patch:
            crash_at(patch, 1, lambda name, args: (_ for _ in ()).throw(RunError("the disk is full")))
            s.finish_later(2, Manifest("dapo", 2))
            with pytest.raises(RunError, match="full"):
                s.wait()
        s.wait()
        assert not s.busy
        fill(s.begin(3), 3)
        s.finish_later(3, Manifest("dapo", 3))
    check(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped byte": (lambda c: flip(c / "engine" / "weights.bin"), "engine/weights.bin differs from its checksum"),
    "flipped byte in the state": (lambda c: flip(c / "sampler.safetensors"), "sampler.safetensors differs from its checksum"),
    "truncated": (lambda c: os.truncate(c / "engine" / "weights.bin", 4999), "engine/weights.bin has 4999 bytes instead of 5000"),
    "missing file": (lambda c: (c / "engine" / "weights.bin").unlink(), "engine/weights.bin is missing"),
    "missing manifest": (lambda c: (c / manifest.NAME).unlink(), "manifest.json is missing"),
    "torn manifest": (lambda c: os.truncate(c / manifest.NAME, 300), "manifest.json cannot be read"),
    "changed manifest": (lambda c: flip_number(c / manifest.NAME), "manifest.json differs from its checksum"),
}


def flip_number(path: Path) -> None:
    text = path.read_text()
    assert '"consumed": 77' in text
    path.write_text(text.replace('"consumed": 77', '"consumed": 78'))


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_one_before_taken(tmp_path, what):
    harm, line = DAMAGE[what]
    with Store(tmp_path, keep_last=3) as s:
        for step in (1, 2, 3):
            save(s, step, consumed=77)
    newest = tmp_path / "step-00000003"
    harm(newest)
    said = []
    assert resolve(tmp_path, said.append).step == 2
    assert len(said) == 1
    assert "step-00000003 is damaged" in said[0]
    assert line in said[0]
    assert verify(newest)[0].startswith(line)
    with pytest.raises(UserError, match="this checkpoint is damaged"):
        resolve(newest)
    with Store(tmp_path, keep_last=3) as s:  # the run goes on from step 2 and comes by step 3 again
        assert save(s, 3, consumed=77).path.name == "step-00000003.2"
    check(tmp_path, 3)


def test_when_all_are_damaged_each_is_named(tmp_path):
    with Store(tmp_path) as s:
        save(s, 1)
        save(s, 2)
    for path in tmp_path.glob("step-*"):
        flip(path / "engine" / "weights.bin")
    with pytest.raises(UserError, match=r"no checkpoint is whole .*step-00000002.*step-00000001"):
        resolve(tmp_path)


def rewrite(path: Path, **changes) -> None:
    """Change a manifest as a writer would, its own checksum included."""
    body = json.loads(path.read_text())
    del body["sha256"]
    body.update(changes)
    body["sha256"] = manifest._digest(body)
    path.write_text(json.dumps(body))


def test_a_newer_schema_is_refused_in_one_line(tmp_path):
    with Store(tmp_path) as s:
        save(s, 1)
        save(s, 2)
    rewrite(tmp_path / "step-00000002" / manifest.NAME, schema=manifest.SCHEMA + 1)
    with pytest.raises(UserError, match=r"newer msrl .*upgrade") as refused:
        resolve(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b"])
def test_a_manifest_cannot_point_outside(tmp_path, name):
    with Store(tmp_path) as s:
        save(s, 1)
    rewrite(tmp_path / "step-00000001" / manifest.NAME, files={name: {"bytes": 1, "sha256": ""}})
    assert "points outside" in verify(tmp_path / "step-00000001")[0]


def test_a_manifest_that_lacks_a_field_is_damaged(tmp_path):
    with Store(tmp_path) as s:
        save(s, 1)
    path = tmp_path / "step-00000001" / manifest.NAME
    body = json.loads(path.read_text())
    del body["sha256"], body["step"]
    path.write_text(json.dumps({**body, "sha256": manifest._digest(body)}))
    assert verify(tmp_path / "step-00000001") == ["manifest.json lacks step"]


def test_the_newest_is_by_sequence_not_by_clock_or_step(tmp_path, monkeypatch):
    with Store(tmp_path, keep_last=3) as s:
        save(s, 5)
        monkeypatch.setattr(time, "strftime", lambda *a: "1970-01-01T00:00:00+0000")
        save(s, 9)
        save(s, 6)  # a user went back to step 5 and on from there
    for index, path in enumerate(sorted(tmp_path.glob("step-*"))):
        os.utime(path, (1000 - index, 1000 - index))
        os.utime(path / manifest.NAME, (1000 - index, 1000 - index))
    check(tmp_path, 6)
    with Store(tmp_path, keep_last=1) as s:
        save(s, 7)
    assert names(tmp_path) == ["step-00000007"]


def test_a_copied_or_moved_folder_is_as_good_and_not_locked(tmp_path):
    with Store(tmp_path / "a") as s:
        save(s, 1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # while the first is being written to
        with Store(tmp_path / "b") as copy:
            save(copy, 2)
        check(tmp_path / "b", 2)
        check(tmp_path / "a", 1)
    (tmp_path / "b").rename(tmp_path / "c")
    check(tmp_path / "c", 2)


def test_two_runs_in_one_folder(tmp_path):
    with Store(tmp_path) as s:
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* writes checkpoints here"):
            Store(tmp_path).open()
        save(s, 1)
    with Store(tmp_path) as s:
        save(s, 2)


HOLDER = "import sys, time; from pathlib import Path; from rlcli.checkpoint.store import Store; Store(Path(sys.argv[1])).open(); print('held', flush=True); time.sleep(60)"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} "):
            Store(tmp_path).open()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with Store(tmp_path) as s:
            save(s, 1)


def test_who_holds_a_lock_without_flock(tmp_path, monkeypatch):
    """On a file system without locks the file's content decides."""
    monkeypatch.setattr(lock, "_flock", lambda file: True)
    with Store(tmp_path):
        path = tmp_path / lock.NAME
        own = json.loads(path.read_text())
        parent = {**own, "pid": os.getppid(), "started": __import__("psutil").Process(os.getppid()).create_time()}
        for held, alive in (
            (parent, True),
            ({**parent, "started": parent["started"] - 100}, False),  # the number was given to another process since
            ({**parent, "inode": 1}, False),  # a copy
            ({**parent, "host": "elsewhere"}, True),
            ({"host": own["host"]}, False),
        ):
            path.write_text(json.dumps(held))
            if alive:
                with pytest.raises(UserError, match="writes checkpoints here"):
                    Store(tmp_path).open()
            else:
                Store(tmp_path).open().close()
        path.write_text('{"pid": 1')
        Store(tmp_path).open().close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_one_line(tmp_path, monkeypatch, number):
    def refuse(*args, **more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot make the folder .*choose a folder that can be written to"):
        Store(tmp_path / "x").open()
    monkeypatch.undo()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="cannot make the lock file"):
        Store(tmp_path / "x").open()


def test_no_room_is_known_before_writing(tmp_path, monkeypatch):
    with Store(tmp_path) as s:
        save(s, 1)
        monkeypatch.setattr(store.shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(10, 9, 1))
        with pytest.raises(RunError, match=r"0.00 GiB free, and step-00000001 took"):
            s.begin(2)
    assert names(tmp_path) == ["step-00000001"]


def test_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        resolve(tmp_path / "none")
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".partial-step-00000001").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint here"):
        resolve(tmp_path)
    assert find.complete(tmp_path / "none") == []


def test_state_that_would_not_come_back_is_refused(tmp_path):
    for values in ({"a": {1: 2}}, {"a": {3}}, {"a": np.float32(1)}):
        with pytest.raises(TypeError):
            write_state(tmp_path, "x", values)
    write_state(tmp_path, "x", {"a": [(1, 2.5)], "b": None})
    assert read_state(tmp_path, "x") == ({"a": [[1, 2.5]], "b": None}, {})
    write_state(tmp_path, "y", {}, {"rng": np.arange(6, dtype=np.uint8)[::2], "none": np.empty((0,), np.float64)})
    _, arrays = read_state(tmp_path, "y")
    assert arrays["rng"].tolist() == [0, 2, 4]
    assert arrays["none"].dtype == np.float64
    with pytest.raises(manifest.Damaged, match="state z"):
        read_state(tmp_path, "z")


def test_abandoned_work_leaves_nothing(tmp_path):
    with Store(tmp_path) as s:
        fill(s.begin(1), 1)
        s.abandon(1)
        assert names(tmp_path) == []
        fill(s.begin(1), 1)
        (s.begin(1) / "only.txt").write_text("x")  # begun again: nothing of the first attempt is left
        assert list(s.finish(1, Manifest("dpo", 1)).manifest.files) == ["only.txt"]
