"""`msrl reward list` and `msrl reward check`: what verifiers there are, and how one judges a text, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.errors import UserError

if TYPE_CHECKING:
    from rlcli.config.schema import RewardConfig
    from rlcli.rewards.pool import Item


def list_verifiers() -> None:
    """The built-in verifiers: what each judges, and its options with their defaults (set by reward.options=[NAME.OPTION=VALUE])."""
    from rlcli.rewards.verifiers import BUILT_IN, find, options_of

    for name in BUILT_IN:
        function = find(name)
        typer.secho(name, bold=True)
        for line in (function.__doc__ or "").strip().splitlines():
            typer.echo(f"    {line.strip()}" if line.strip() else "")
        for option, default in options_of(function).items():
            typer.echo(f"    option {name}.{option}={str(default).lower() if isinstance(default, bool) else default}")
    typer.echo("\nA function of your own: package.module:function(text, truth, extra, *, options...) -> Verdict or a number.")


def check(
    verifier: Annotated[list[str], typer.Option("--verifier", "-v", help="A verifier by name, or package.module:function; may be repeated.")],
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="The right answer.")] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="The response to judge; - reads it from standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="JSON lines of responses: text (or response) and answer (or truth).")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="NAME.OPTION=VALUE; may be repeated.")] = None,
    weight: Annotated[list[float] | None, typer.Option("--weight", "-w", help="Weight of each verifier's score.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one verdict may take.")] = 5.0,
) -> None:
    """Judge one text, or a file of them, in a process like training's, and show what was extracted, compared and decided.

    msrl reward check --verifier math --answer '\\frac12' --text 'So it is \\boxed{0.5}.'
    """
    from rlcli.config.schema import RewardConfig

    if timeout <= 0:
        raise UserError(f"--timeout must be above 0, not {timeout}")
    weights = list(weight) if weight else [1.0] * len(verifier)
    config = RewardConfig(verifiers=list(verifier), weights=weights, options=list(option or []), timeout_s=timeout, workers=1)
    if file is not None:
        if text is not None or answer is not None:
            raise UserError("give either --file, or --answer and --text")
        _check_file(config, file)
    elif answer is None or text is None:
        raise UserError("give --answer and --text, or --file with lines of both")
    else:
        _check_one(config, answer, typer.get_text_stream("stdin").read() if text == "-" else text)


def _check_one(config: RewardConfig, answer: str, text: str) -> None:
    from rlcli.rewards.pool import Item, RewardPool

    with RewardPool(config) as pool:
        verdict, reply = pool.explain(Item(text, answer))
        lost = pool.last_crash
    for part in reply.get("parts", []):
        score, correct, extracted, reason = part["verdict"]
        _line("verifier", part["name"])
        _line("extracted", "nothing" if extracted is None else extracted)
        if part["compared"]:
            _line("compared", "-" if part["compared"][0] is None else part["compared"][0])
            _line("with", part["compared"][1])
        _line("verdict", f"{reason}, correct={str(correct).lower()}, score {score:g}")
        typer.echo("")
    if verdict.reason == "timeout":
        lost = f"no verdict within {config.timeout_s:g} s; the process was ended"
    if verdict.reason in ("timeout", "crashed"):
        _line("lost", lost)
    _line("score", f"{verdict.score:g}")
    _line("correct", str(verdict.correct).lower())
    _line("reason", verdict.reason)
    if "seconds" in reply:
        _line("time", f"{reply['seconds'] * 1000:.2f} ms")


def _check_file(config: RewardConfig, file: Path) -> None:
    from rlcli.rewards.pool import RewardPool
    from rlcli.rewards.verdicts import count_reasons

    items = _read(file)
    with RewardPool(config) as pool:
        verdicts = pool.judge(items)
    typer.echo(f"{'line':>5}  {'score':>6}  {'reason':9}  {'extracted':30}  answer")
    for number, (item, verdict) in enumerate(zip(items, verdicts, strict=True), 1):
        extracted = "-" if verdict.answer is None else " ".join(verdict.answer.split())
        typer.echo(f"{number:5}  {verdict.score:6.2f}  {verdict.reason:9}  {_printable(extracted)[:30]:30}  {_printable(item.truth)[:30]}")
    right = sum(verdict.correct for verdict in verdicts)
    counts = ", ".join(f"{count} {reason}" for reason, count in count_reasons(verdicts).items() if count)
    typer.echo(f"\n{right} of {len(verdicts)} correct ({counts})")


def _read(file: Path) -> list[Item]:
    """The rows of a JSON lines file. Errors: UserError naming file and line."""
    import json

    from rlcli.rewards.pool import Item

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: not JSON: {error}") from None
        text, truth = (_field(row, names, file, number) for names in (("text", "response"), ("answer", "truth")))
        items.append(Item(text, truth, {key: value for key, value in row.items() if key not in ("text", "response", "answer", "truth")}))
    if not items:
        raise UserError(f"{file}: holds no rows")
    return items


def _field(row: Any, names: tuple[str, str], file: Path, number: int) -> str:
    value = next((row[name] for name in names if name in row), None) if isinstance(row, dict) else None
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{file}, line {number}: needs a text in {names[0]!r} (or {names[1]!r})")
    return str(value)


def _line(name: str, value: str) -> None:
    typer.echo(f"{name:10} {_printable(value)}")


def _printable(text: str) -> str:
    """Without what a terminal would act on, and without half surrogates."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
