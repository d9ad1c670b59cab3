"""`--max-time`: what it understands, and that it is the setting run.max_minutes of each command that has it."""

from __future__ import annotations

import pytest

from rlcli.app import main
from rlcli.commands.budget import minutes, with_budget
from rlcli.errors import UserError


@pytest.mark.parametrize(("text", "expected"), [
    ("90m", 90.0), ("4h", 240.0), ("1h30m", 90.0), ("2d", 2880.0), ("45s", 0.75), ("1.5h", 90.0), ("01:30:00", 90.0), ("1-12:00:30", 2160.5),
])
def test_forms(text: str, expected: float) -> None:
    assert minutes(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "90", "soon", "-5m", "1h 30m", "90:00", "0m", "00:00:00", "5x"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="--max-time"):
        minutes(text)


def test_it_comes_after_the_overrides() -> None:
    assert with_budget(["a.b=1", "run.max_minutes=5"], "2h") == ["a.b=1", "run.max_minutes=5", "run.max_minutes=120"]
    assert with_budget(None, None) == []


@pytest.mark.parametrize("command", [("train", "dapo"), ("train", "dpo"), ("resume", "--ckpt", "nowhere")])
def test_each_command_has_it(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--max-time", "soon"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --max-time soon: must be a time as 90m, 4h, 1h30m or HH:MM:SS\n"


@pytest.mark.parametrize("kind", ["dapo", "dpo"])
def test_it_sets_the_budget_of_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlcli.config.load as configuration

    class Enough(Exception):
        pass

    def load(kind: str, recipe: object, overrides: list[str]) -> None:
        raise Enough(*overrides)

    monkeypatch.setattr(configuration, "load", load)
    from rlcli.commands import train

    with pytest.raises(Enough) as told:
        getattr(train, kind)(["train.steps=3"], None, False, "1h30m")
    assert told.value.args == ("train.steps=3", "run.max_minutes=90")
