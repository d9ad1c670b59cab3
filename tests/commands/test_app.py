"""The command line's root: what it lists, how it ends, and that nothing heavy is loaded before it is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlcli import app
from rlcli.errors import MsrlError, RunError, StoppedEarly, UserError

ROOT = Path(__file__).resolve().parents[2]


def msrl(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real program in a process of its own."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **(env or {})}
    return subprocess.run([sys.executable, "-m", "rlcli.app", *args], capture_output=True, text=True, timeout=60, env=given, check=False)


def ended(capsys, error: BaseException, monkeypatch, *args: str) -> tuple[object, str]:
    """Exit code and stderr of `main` when a command raises `error`."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "COMMANDS", [app.Entry("recipes list", "recipes:list_recipes", "", app.PREPARE)])
    monkeypatch.setattr("rlcli.commands.recipes.list_recipes", fail)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit) as caught:
        app.main(["recipes", "list", *args])
    return caught.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("two faults:\nof the user"), 2, "error: two faults:\nerror: of the user\n"),
        (RunError("rank 1 died in step 3"), 1, "error: rank 1 died in step 3\n"),
        (StoppedEarly("out of time; go on with msrl resume"), 3, "stopped: out of time; go on with msrl resume\n"),
        (MsrlError("base"), 1, "error: base\n"),
        (ValueError("odd\nvalue"), 1, "error: ValueError: odd value (run again with --debug to see where)\n"),
        (KeyError(), 1, "error: KeyError: no message (run again with --debug to see where)\n"),
    ],
)
def test_errors_become_lines_and_exit_codes(capsys, monkeypatch, error, code, text):
    assert ended(capsys, error, monkeypatch) == (code, text)


def test_debug_shows_the_traceback_wherever_it_stands(monkeypatch):
    def fail() -> None:
        raise UserError("wrong")

    monkeypatch.setattr("rlcli.commands.recipes.list_recipes", fail)
    for args in (["--debug", "recipes", "list"], ["recipes", "list", "--debug"]):
        with pytest.raises(UserError):
            app.main(args)
    monkeypatch.setenv("MSRL_DEBUG", "1")
    with pytest.raises(UserError):
        app.main(["recipes", "list"])
    assert app._take_debug(["a", "--", "--debug"])[0] == ["a", "--", "--debug"]


def test_every_command_of_the_table_that_exists_loads_and_has_help():
    present = [entry for entry in app.COMMANDS if entry.exists]
    assert {"recipes list", "recipes show", "recipes copy", "recipes import", "doctor"} <= {entry.words for entry in present}
    for entry in present:
        result = CliRunner().invoke(app.application(), [*entry.words.split(), "--help"])
        assert result.exit_code == 0, (entry.words, result.output)
        assert "Usage: " in result.output


def test_a_command_without_its_module_is_not_listed(monkeypatch):
    monkeypatch.setattr(app, "COMMANDS", [app.Entry("ghost walk", "ghost:walk", "", app.LOOK), app.Entry("doctor", "doctor:doctor", "Check.", app.MACHINE)])
    result = CliRunner().invoke(app.application(), ["--help"])
    assert "doctor" in result.output
    assert "ghost" not in result.output
    assert CliRunner().invoke(app.application(), ["ghost"]).exit_code == 2


def test_help_lists_commands_by_panel():
    done = msrl("--help")
    assert done.returncode == 0
    assert "Prepare" in done.stdout
    assert "recipes" in done.stdout
    assert done.stderr == ""


def test_help_and_light_commands_load_nothing_heavy():
    code = (
        "import sys; from rlcli import app\n"
        "for args in (['--help'], ['recipes', 'list'], ['recipes', 'show', 'demo'], ['train', '--help'], ['doctor', '--help']):\n"
        "    try: app.main(args)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'megatron', 'pyarrow', 'numpy', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_wrong_input_ends_the_program_with_2_and_one_line():
    done = msrl("recipes", "show", "demo", "dapo.clip_hihg=3")
    assert done.returncode == 2
    assert done.stderr == "error: dapo.clip_hihg is not a setting; did you mean dapo.clip_high? (command line)\n"
    assert done.stdout == ""
    assert msrl("nonsense").returncode == 2
    assert msrl("recipes", "show", "--nonsense").returncode == 2
    assert msrl("--version").stdout.startswith("msrl")


def test_doctor_ends_with_1_where_something_is_bad(monkeypatch, tmp_path):
    from rlcli.platforms import checkup

    result = CliRunner().invoke(app.application(), ["doctor", "--json"])
    findings = json.loads(result.output)
    assert {"Python", "platform", "temporary files", "open files"} <= {finding["name"] for finding in findings}
    assert result.exit_code == int(any(finding["state"] == "bad" for finding in findings))

    monkeypatch.setattr(checkup, "supported", lambda extra: (">=3.8", ["rich<2", "nothing-of-this-name>=1", "typer>=0.1", 'other; extra == "x"']))
    result = CliRunner().invoke(app.application(), ["doctor", "--json"])
    states = {finding["name"]: finding["state"] for finding in json.loads(result.output)}
    assert (states["rich"], states["nothing-of-this-name"], states["typer"], states["Python"]) == ("bad", "bad", "ok", "ok")
    assert "other" not in states
    assert result.exit_code == 1
    shown = CliRunner().invoke(app.application(), ["doctor"], env={"COLUMNS": "200"})
    assert "not installed  -> pip install" in shown.output
    assert "Not ready." in shown.output


def test_an_engine_that_does_not_load_is_bad_with_its_last_words():
    from rlcli.platforms import checkup

    finding = checkup._import("thing", "import no_such_module_here")
    assert (finding.state, finding.text) == ("bad", "does not load: ModuleNotFoundError: No module named 'no_such_module_here'")
    assert checkup._import("thing", "print('1.2.3')").text.startswith("1.2.3 loads in ")
