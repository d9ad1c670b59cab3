"""A folder is whole or not there, however the process that writes it ends; and worker processes end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlcli.data.staging import staged_folder

WRITES = """
import sys
from pathlib import Path
from rlcli.data.staging import staged_folder
with staged_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""

PREPARES = """
import os, sys
from rlcli.data import pipeline
from rlcli.data.prepare import prepare
from rlcli.data.settings import PrepareSettings
from rlcli.data.workers import EncodePool

start = EncodePool._result
def first_result(self, *args):
    done = start(self, *args)
    print(*self._pool._processes, flush=True)
    sys.stdin.read()
    return done
EncodePool._result = first_result
if __name__ == "__main__":
    prepare(PrepareSettings(input=[sys.argv[2]], out=sys.argv[1], tokenizer=sys.argv[3], workers=2))
"""


def _start(code: str, tmp_path: Path, *args: str) -> tuple[subprocess.Popen[str], str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, str(script), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, sent: signal.Signals, old: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    if old:
        out.mkdir()
        (out / "old").write_text("whole")
    process, said = _start(WRITES, tmp_path, str(out))
    assert said == "writing"
    process.send_signal(sent)
    assert process.wait(60) != 0
    assert [path.name for path in place.iterdir()] == (["out"] if old else [])
    assert not old or (out / "old").read_text() == "whole"


def test_a_killed_writer_leaves_no_data_set_and_the_next_cleans_up(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    process, _ = _start(WRITES, tmp_path, str(place / "out"))
    process.kill()
    process.wait(60)
    assert [path.name for path in place.iterdir()] == [f".out.partial-{process.pid}"]
    with staged_folder(place / "out") as folder:
        (folder / "whole").write_text("whole")
    assert [path.name for path in place.iterdir()] == ["out"]
    assert (place / "out" / "whole").read_text() == "whole"


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_folder(out) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(RuntimeError), staged_folder(out) as folder:
        raise RuntimeError
    assert [path.name for path in out.iterdir()] == ["a"]
    with staged_folder(out) as folder:
        (folder / "b").write_text("2")
    assert [path.name for path in out.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_folder_whose_successor_never_came_is_brought_back(tmp_path: Path) -> None:
    (tmp_path / ".out.old-999999999").mkdir()
    (tmp_path / ".out.old-999999999" / "a").write_text("1")
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "out"):
        raise RuntimeError
    assert (tmp_path / "out" / "a").read_text() == "1"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_preparation(tmp_path: Path, tiny_tokenizer_folder: Path, sent: signal.Signals) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "q{i}", "answer": "1"}}\n' for i in range(2000)))
    place = tmp_path / "place"
    place.mkdir()
    process, said = _start(PREPARES, tmp_path, str(place / "out"), str(rows), str(tiny_tokenizer_folder))
    children = [psutil.Process(int(pid)) for pid in said.split()]
    assert len(children) == 2
    process.send_signal(sent)
    process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert not (place / "out").exists()
    if sent == signal.SIGTERM:
        assert not list(place.iterdir())
