"""What a run's folder holds after going back to older checkpoints, also when that is cut short; and where it cannot be written."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from rlcli.checkpoint.manifest import NAME, Manifest, encode
from rlcli.config.load import load
from rlcli.errors import MsrlError, RunError, UserError
from rlcli.runs import folder as folders
from rlcli.runs import jsonl
from rlcli.runs.folder import RunFolder, read_state, record_finished, require_free


def config(tmp_path: Path, *overrides: str) -> Any:
    return load("dapo", None, ["model=m", "data.train=d", "train.steps=8", f"run.dir={tmp_path / 'runs'}", *overrides]).config


class Story:
    """A run that is trained, killed and resumed; each start writes its own letter into the rows of its steps, and saves every step."""

    def __init__(self, tmp_path: Path) -> None:
        self.settings, self.sequence = config(tmp_path, "run.name=r"), 0
        self.path = tmp_path / "runs" / "r"

    def train(self, letter: str, run: RunFolder, steps: range) -> None:
        """As killed after the last of them: nothing is closed but the lock, which the system takes back."""
        samples = jsonl.Appender(run.path / "samples" / "train.jsonl")
        for step in steps:
            run.log_step(step, {"by": letter})  # type: ignore[dict-item]
            samples.extend([{"step": step, "by": letter}] * 2)
            self.sequence += 1
            saved = run.checkpoints / f"step-{step:08d}.{self.sequence}"
            saved.mkdir(parents=True)
            (saved / NAME).write_bytes(encode(Manifest("dapo", step, sequence=self.sequence)))
        os.close(run._lock)

    def begin(self, letter: str, steps: range) -> None:
        self.train(letter, RunFolder.create(self.settings, "dapo", out=io.StringIO()), steps)

    def resume(self, letter: str, step: int, steps: range = range(0), sequence: int | None = None) -> str:
        out = io.StringIO()
        self.train(letter, RunFolder.reopen(self.path, self.settings, step, out=out, sequence=sequence), steps)
        return out.getvalue()

    @property
    def rows(self) -> str:
        """Who wrote the rows of each step; metrics and samples agree."""
        metrics = [(row["step"], row["by"]) for row in jsonl.read(self.path / "metrics.jsonl")]
        samples = [(row["step"], row["by"]) for row in jsonl.read(self.path / "samples" / "train.jsonl")]
        assert samples == [row for row in metrics for _ in range(2)]
        assert [step for step, _ in metrics] == list(range(1, len(metrics) + 1))
        return "".join(by for _, by in metrics)


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr(RunFolder, "log_step", lambda run, step, metrics: run._metrics.append({"step": step, **metrics}))
    story = Story(tmp_path)
    story.begin("a", range(1, 9))
    return story


def test_a_resumption_from_an_older_checkpoint_that_is_killed_at_once_is_undone_by_the_next(story: Story) -> None:
    assert "6 lines of metrics and samples after step 6 were set aside" in story.resume("b", 6)
    assert story.rows == "aaaaaa"
    said = story.resume("c", 8)
    assert story.rows == "aaaaaaaa"
    assert "6 lines up to step 8 that had been set aside are back" in said


def test_so_are_several_in_a_row(story: Story) -> None:
    for step in (6, 3, 5, 3):
        story.resume("b", step)
        assert story.rows == "a" * step
    story.resume("c", 8)
    assert story.rows == "aaaaaaaa"


def test_each_checkpoint_brings_back_the_rows_of_its_own_course(story: Story) -> None:
    story.resume("b", 4, range(5, 8))  # checkpoints 9 to 11
    assert story.rows == "aaaabbb"
    story.resume("c", 8, range(9, 11))  # the first course goes on
    assert story.rows == "aaaaaaaacc"
    story.resume("d", 6, range(7, 8), sequence=10)  # and the second
    assert story.rows == "aaaabbd"
    story.resume("e", 10)
    assert story.rows == "aaaaaaaacc"
    story.resume("f", 7, sequence=7)
    assert story.rows == "aaaaaaa"
    story.resume("g", 7)
    assert story.rows == "aaaabbd"


def test_rows_come_back_when_a_rewinding_itself_was_cut_short(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(draft: Path, target: Path) -> None:
        raise KeyboardInterrupt

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        jsonl.rewind(story.path / "metrics.jsonl", 3, 3, 8)
    monkeypatch.setattr(Path, "replace", replace)
    aside = story.path / "metrics.jsonl.set-aside"
    aside.write_bytes(aside.read_bytes()[:-9])  # its last line torn, as well
    story.resume("b", 6)
    assert story.rows == "aaaaaa"
    story.resume("b", 8)
    assert story.rows == "aaaaaaaa"


def test_a_run_found_finished_is_recorded_so(story: Story) -> None:
    story.resume("b", 6)
    assert read_state(story.path)["state"] == "running"
    record_finished(story.path, 8, 8)
    assert story.rows == "aaaaaaaa"
    state = read_state(story.path)
    assert (state["state"], state["step"]) == ("finished", 8)
    record_finished(story.path, 6, 6)  # as with train.steps=6: that is not how this run ended
    assert (story.rows, read_state(story.path)) == ("aaaaaaaa", state)


def test_a_run_that_goes_on_is_told_before_its_checkpoints_are_read(tmp_path: Path) -> None:
    run = RunFolder.create(config(tmp_path), "dapo", out=io.StringIO())
    for place in (run.path, run.checkpoints, run.checkpoints / "step-00000001"):
        with pytest.raises(UserError, match="is in use by another run"):
            require_free(place)
    run.finish()
    for place in (run.path, run.checkpoints / "step-00000001", tmp_path, Path("nowhere")):
        require_free(place)
    RunFolder.reopen(run.path, run.config, 0, out=io.StringIO()).finish()  # nothing is held


def test_a_read_only_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(config(tmp_path), "dapo", out=io.StringIO())
    run.finish()

    def refusing(path: Any, flags: int, mode: int = 0) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(folders.os, "open", refusing)
    with pytest.raises(UserError) as caught:
        RunFolder.reopen(run.path, run.config, 0, out=io.StringIO())
    assert str(caught.value) == (
        f"cannot write to {run.path}: read-only file system; make it writable, or copy the checkpoint elsewhere and go on from there: "
        "msrl resume --ckpt COPY run.dir=DIR"
    )


def test_a_place_for_runs_that_cannot_be_written_is_known_before_anything_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"run\.dir={tmp_path}/file/runs: {tmp_path}/file is no folder; choose"):
        RunFolder.check(config(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=rf"run\.dir={tmp_path}/runs: {tmp_path} cannot be written to; choose"):
        RunFolder.check(config(tmp_path))


@pytest.mark.parametrize("fault", [None, RunError("step 3, update: train rank 0 died")])
def test_a_record_that_cannot_be_written_hides_no_error_and_says_how_to_go_on(fault: MsrlError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    run = RunFolder.create(config(tmp_path), "dapo", out=out)

    def refusing(path: Path, value: Any) -> None:
        raise RunError(f"cannot write {path}: Read-only file system")

    def end() -> None:
        with run:
            monkeypatch.setattr(folders, "_write_json", refusing)
            if fault:
                raise fault

    with pytest.raises(RunError) as caught:
        end()
    if fault:
        assert caught.value is fault
        assert "warning: cannot write" in out.getvalue()
    else:
        assert str(caught.value).endswith(f"to have it written: msrl resume --ckpt {run.path}")
    monkeypatch.undo()
    RunFolder.reopen(run.path, run.config, 0, out=io.StringIO()).finish()  # the lock was given back


def test_a_full_disk_puts_no_tracebacks_of_the_log_on_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(config(tmp_path), "dapo", out=io.StringIO())

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    handler: Any = run.log.handlers[0]
    handler.setStream(Full()).close()
    run.console.info("a line")
    run.finish()
    assert "Traceback" not in capfd.readouterr().err
