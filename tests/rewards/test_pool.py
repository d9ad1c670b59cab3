"""The pool: verdicts in order, only the guilty item lost, every loss counted, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcli.config.schema import RewardConfig
from rlcli.errors import RunError, UserError
from rlcli.rewards import process
from rlcli.rewards.pool import Item, RewardPool

ROOT = Path(__file__).resolve().parents[2]


def config(*verifiers: str, **settings: Any) -> RewardConfig:
    return RewardConfig(verifiers=list(verifiers), weights=[1.0] * len(verifiers), **{"workers": 1, "timeout_s": 30.0, **settings})


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def naughty() -> Iterator[RewardPool]:
    with RewardPool(config("naughty:act", memory_mib=512)) as pool:
        yield pool


def test_verdicts_come_in_order() -> None:
    with RewardPool(config("dapo", workers=2)) as pool:
        verdicts = pool.judge([Item(f"Answer: {number}", str(number - number % 3)) for number in range(100)])
        assert [verdict.correct for verdict in verdicts] == [number % 3 == 0 for number in range(100)]
        assert [verdict.answer for verdict in verdicts] == [str(number) for number in range(100)]
        assert pool.counts == {"correct": 34, "wrong": 66}
        assert pool.restarts == 0


def test_submissions_are_polled_by_key() -> None:
    with RewardPool(config("dapo", workers=2)) as pool:
        for key in range(5):
            pool.submit(key, [Item("Answer: 1", str(index)) for index in range(key)])
        finished: dict[int, list[bool]] = {}
        while len(finished) < 5:
            finished.update({key: [verdict.correct for verdict in verdicts] for key, verdicts in pool.poll(10.0)})
        assert finished == {0: [], 1: [False], 2: [False, True], 3: [False, True, False], 4: [False, True, False, False]}
        assert pool.poll(0.0) == []


def test_nothing_heavy_is_imported_and_sympy_only_where_it_is_needed() -> None:
    heavy = "torch,vllm,ray,transformers,omegaconf,pyarrow,megatron"
    with RewardPool(config("naughty:modules", "dapo", "boxed")) as pool:
        assert pool.judge([Item("", heavy + ",sympy,math_verify")])[0].answer == ""
    with RewardPool(config("naughty:modules", "math")) as pool:
        assert pool.judge([Item("", heavy + ",sympy,math_verify")])[0].answer == "sympy,math_verify"


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("exit", "exit status 0"),
        ("hard exit", "exit status 7"),
        ("kill", "SIGKILL"),
        ("segfault", "SIGSEGV"),
        ("raise", "ZeroDivisionError"),
        ("recurse", "RecursionError"),
        ("allocate", "out of memory"),
        ("close", ""),
    ],
)
def test_a_crash_loses_one_item_and_says_why(naughty: RewardPool, deed: str, said: str) -> None:
    before = dict(naughty.counts)
    verdicts = naughty.judge([Item("fine", "fine"), Item(deed, "x"), Item("fine", "fine"), Item("fine", "other")])
    assert [verdict.reason for verdict in verdicts] == ["correct", "crashed", "correct", "wrong"]
    assert (verdicts[1].score, verdicts[1].correct) == (-3.0, False)  # what the verifier says a wrong answer scores
    assert said in naughty.last_crash
    assert naughty.counts["crashed"] == before.get("crashed", 0) + 1


def test_garbage_on_the_standard_streams_does_no_harm(naughty: RewardPool) -> None:
    restarts = naughty.restarts
    verdicts = naughty.judge([Item("chatter", "chatter"), Item("fine", "fine")])
    assert [verdict.reason for verdict in verdicts] == ["correct", "correct"]
    assert naughty.restarts == restarts


@pytest.mark.parametrize("deed", ["sleep", "spin"])
def test_a_stuck_verifier_is_killed_and_counted_as_a_timeout(deed: str) -> None:
    with RewardPool(config("naughty:act", timeout_s=1.0)) as pool:
        verdicts = pool.judge([Item("fine", "fine"), Item(deed, "x"), Item("fine", "fine")])
        assert [verdict.reason for verdict in verdicts] == ["correct", "timeout", "correct"]
        assert verdicts[1].score == -3.0
        assert pool.counts == {"correct": 2, "timeout": 1}
        assert pool.restarts == 1


def test_one_that_disarms_its_timer_is_killed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    with RewardPool(config("naughty:act", timeout_s=1.0)) as pool:
        verdicts = pool.judge([Item("deaf", "x"), Item("fine", "fine")])
    assert [verdict.reason for verdict in verdicts] == ["timeout", "correct"]


def test_waiting_in_the_queue_does_not_count_as_time() -> None:
    """Each sleeps to the limit, so the last waits four limits for its turn; it is judged all the same."""
    with RewardPool(config("naughty:act", timeout_s=1.0)) as pool:
        verdicts = pool.judge([Item("sleep", "x")] * 4 + [Item("fine", "fine")])
    assert [verdict.reason for verdict in verdicts] == ["timeout"] * 4 + ["correct"]


def test_a_worker_killed_in_the_middle_loses_only_its_item(tmp_path: Path) -> None:
    extra = {"dir": str(tmp_path)}
    with RewardPool(config("naughty:record_pid", workers=2)) as pool:
        pool.submit("hit", [Item("wait", "", extra)])
        until(lambda: len(list(tmp_path.iterdir())) == 1)
        os.kill(int(next(tmp_path.iterdir()).name), signal.SIGKILL)
        pool.submit("others", [Item("go", "", extra)] * 20)
        finished: dict[str, list[str]] = {}
        while len(finished) < 2:
            finished.update({key: [verdict.reason for verdict in verdicts] for key, verdicts in pool.poll(10.0)})
        assert finished == {"hit": ["crashed"], "others": ["correct"] * 20}


def test_a_worker_killed_while_idle_loses_nothing(tmp_path: Path) -> None:
    extra = {"dir": str(tmp_path)}
    with RewardPool(config("naughty:record_pid")) as pool:
        first = int(pool.judge([Item("go", "", extra)])[0].answer or 0)
        os.kill(first, signal.SIGKILL)
        until(lambda: gone(first))
        second = pool.judge([Item("go", "", extra)])[0]
        assert second.reason == "correct"
        assert second.answer != str(first)
        assert pool.restarts == 1


def test_closing_ends_all_workers_though_they_are_busy(tmp_path: Path) -> None:
    with RewardPool(config("naughty:record_pid", workers=2)) as pool:
        pool.submit("a", [Item("wait", "", {"dir": str(tmp_path)})] * 2)
        until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert all(gone(int(path.name)) for path in tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="closed"):
        pool.judge([Item("", "")])


@pytest.mark.parametrize("busy", ["wait", "go"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, busy: str) -> None:
    program = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
        from rlcli.config.schema import RewardConfig
        from rlcli.rewards.pool import Item, RewardPool
        with RewardPool(RewardConfig(verifiers=["naughty:record_pid"], workers=2, timeout_s=300.0)) as pool:
            for index in range(2):
                pool.submit(index, [Item({busy!r}, "", {{"dir": {str(tmp_path)!r}}}) for _ in range(20)])
            while True:
                pool.poll(1.0)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: all(gone(int(path.name)) for path in tmp_path.iterdir()), 10.0)


def test_extra_columns_arrive_as_they_are() -> None:
    with RewardPool(config("naughty:columns")) as pool:
        assert pool.judge([Item("", "", {"level": 3, "tags": ["a", "b"], "note": "\ud800\x00"})])[0].correct


def test_a_long_answer_is_cut() -> None:
    with RewardPool(config("naughty:long_answer")) as pool:
        assert pool.judge([Item("", "")])[0].answer == "\U0001f600" * 1000


@pytest.mark.parametrize(("name", "said"), [("as_nothing", "NoneType"), ("as_nan", "nan"), ("odd_reason", "because")])
def test_a_return_value_that_is_no_verdict_is_a_crash_that_says_so(name: str, said: str) -> None:
    with RewardPool(config(f"naughty:{name}")) as pool:
        assert pool.judge([Item("", "")])[0].reason == "crashed"
        assert said in pool.last_crash


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"verifiers": ["bocksed"]}, "did you mean boxed?"),
        ({"verifiers": []}, "name at least one"),
        ({"verifiers": ["dapo", "boxed"]}, "1 values for 2 verifiers"),
        ({"verifiers": ["dapo"], "weights": [float("nan")]}, "finite"),
        ({"verifiers": ["dapo"], "options": ["dapo.windw=5"]}, "did you mean window?"),
        ({"verifiers": ["dapo"], "options": ["dapo.window=many"]}, "a whole number"),
        ({"verifiers": ["dapo"], "options": ["window=5"]}, "NAME.OPTION=VALUE"),
        ({"verifiers": ["dapo"], "options": ["boxed.window=5"]}, "not in reward.verifiers"),
        ({"verifiers": ["regex"], "options": ["regex.pattern=("]}, "not a regular expression"),
        ({"verifiers": ["length"], "options": ["length.unit=miles"]}, "characters, words or lines"),
        ({"verifiers": ["length"], "options": ["length.least=9", "length.most=5"]}, "least <= most"),
        ({"verifiers": ["no_such_module:judge"]}, "ModuleNotFoundError"),
        ({"verifiers": ["naughty:no_such_function"]}, "AttributeError"),
        ({"verifiers": ["naughty:NOT_CALLABLE"]}, "not a function"),
        ({"verifiers": ["naughty:too_few"]}, "must take (text, truth, extra)"),
        ({"verifiers": ["naughty:"]}, "package.module:function"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught, RewardPool(RewardConfig(**settings)):
        pass
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_workers_that_cannot_start_are_a_fault_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BOOT", "raise SystemExit(9)")
    with pytest.raises(RunError, match="exit status 9"), RewardPool(config("dapo")):
        pass


def test_workers_that_no_longer_start_are_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardPool(config("naughty:act")) as pool:
        monkeypatch.setattr(process, "BOOT", "raise SystemExit(9)")
        with pytest.raises(RunError, match="exit status 9"):
            pool.judge([Item("kill", "x"), Item("fine", "fine")])
