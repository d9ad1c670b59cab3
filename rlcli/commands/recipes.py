"""`msrl recipes`: list, show, copy, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from rlcli.errors import UserError

if TYPE_CHECKING:
    from rlcli.config.load import Loaded
    from rlcli.config.settings import Setting

Kind = Annotated[Optional[str], typer.Option("--kind", "-k", help="dapo or dpo, where a name is in both.", metavar="KIND")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")]


def list_recipes() -> None:
    """The recipes there are, and what each is for."""
    from rich.table import Table

    from rlcli.config import recipes

    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("kind", "recipe", "model", "what it is for"):
        table.add_column(heading, no_wrap=heading != "what it is for", ratio=1 if heading == "what it is for" else None)
    for kind in recipes.KINDS:
        for name, path in recipes.available(kind).items():
            table.add_row(kind, f"[cyan]{name}[/cyan]", recipes.model_name(path), recipes.purpose(path))
    console.print(table)
    console.print("\n[dim]See one: msrl recipes show NAME --diff    Edit one: msrl recipes copy NAME mine.yaml[/dim]")


def show(
    name: Annotated[Optional[str], typer.Argument(help="A recipe's name or file; without it the defaults (with --kind).")] = None,
    overrides: Annotated[Optional[list[str]], typer.Argument(help="Settings as key=value, as for `msrl train`.")] = None,
    kind: Kind = None,
    diff: Annotated[bool, typer.Option("--diff", "-d", help="Only what differs from the defaults.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="The resolved configuration as YAML.")] = False,
) -> None:
    """Every setting of a recipe: its value, what it means, its default, and what set it."""
    from rlcli.config.load import load, to_yaml

    if name is not None and "=" in name:
        overrides, name = [name, *(overrides or [])], None
    found = _kind_of(name, kind)
    loaded = load(found, name, overrides or [], complete=False)
    if as_yaml:
        typer.echo(to_yaml(loaded.config), nl=False)
    elif diff:
        _show_differences(loaded)
    else:
        _show_all(loaded)


def copy(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    file: Annotated[Path, typer.Argument(help="Your file, NAME.yaml.")],
    kind: Kind = None,
    force: Force = False,
) -> None:
    """Copy a recipe to a file of your own, to edit and train with."""
    from rlcli.config import recipes

    found = _kind_of(name, kind)
    source = recipes.find(found, name)
    target = _target(file / source.name if file.is_dir() else file, force)
    _write(target, source.read_text(encoding="utf-8"))
    typer.echo(f"{target}: edit it, then  msrl train {found} --recipe {_as_argument(target)}")


def import_recipe(
    file: Annotated[Path, typer.Argument(help="The MindSpeed-RL YAML.")],
    output: Annotated[Optional[Path], typer.Argument(help="The recipe to write, NAME.yaml; without it, it is printed.")] = None,
    force: Force = False,
) -> None:
    """Turn a MindSpeed-RL YAML into a recipe, and say what of it has no counterpart and why."""
    from rlcli.config.mindspeed import recipe_text, translate

    out = translate(_read_yaml(file))
    text = recipe_text(out, file.name)
    _prove(out.kind, out.settings)
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write(_target(output, force), text)
    _show_translation(out, output)


def _kind_of(name: str | None, kind: str | None) -> str:
    """The kind that is meant: the given one, or the one that has a recipe of this name."""
    from rlcli.config import recipes

    if kind is not None:
        if kind not in recipes.KINDS:
            raise UserError(f"--kind {kind}: it is {' or '.join(recipes.KINDS)}")
        return kind
    if name is None:
        raise UserError("Name a recipe (see `msrl recipes list`), or say --kind dapo or --kind dpo for the defaults")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _kind_of_file(recipes.find("dapo", name))
    found = [item for item in recipes.KINDS if name in recipes.available(item)]
    if len(found) == 2:
        raise UserError(f"There is a recipe {name} for dapo and one for dpo: say --kind dapo or --kind dpo")
    return found[0] if found else "dapo"


def _kind_of_file(path: Path) -> str:
    """A file's kind by what it sets: the first kind that knows all of its sections."""
    from rlcli.config.settings import sections

    names = set(_read_yaml(path)) - {"base", "model"}
    fits = [kind for kind in ("dapo", "dpo") if {str(name).split(".")[0] for name in names} <= set(sections(kind))]
    return fits[0] if fits else "dapo"


def _show_all(loaded: Loaded) -> None:
    from rich.table import Table

    from rlcli.config.settings import table

    console = _console()
    console.print(f"[bold]{loaded.recipe_name or 'defaults'}[/bold] [dim]({loaded.kind}; what differs from the defaults is [/dim][green]green[/green][dim])[/dim]")
    section = None
    grid: Table | None = None
    for key, setting in table(loaded.kind).items():
        head = key.rpartition(".")[0]
        if head != section or grid is None:
            if grid is not None:
                console.print(grid)
            section = head
            console.print(f"\n[bold]{head or 'model'}[/bold]")
            grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, width=24)
            grid.add_column(width=20, overflow="fold")
            grid.add_column(ratio=1)
        grid.add_row(*_setting_row(loaded, setting))
    if grid is not None:
        console.print(grid)


def _setting_row(loaded: Loaded, setting: Setting) -> tuple[Any, Any, Any]:
    from rich.text import Text

    from rlcli.config.load import get

    value = get(loaded.config, setting.key)
    changed = value != setting.default
    meaning = Text(setting.help)
    extra = [f"default {_words(setting.default)}"] if changed and not setting.required else []
    extra += [loaded.sources[setting.key]] if setting.key in loaded.sources else []
    if extra:
        meaning.append(f"  [{'; '.join(extra)}]", style="dim")
    style = "green" if changed else "red" if setting.required else ""
    return Text(setting.key.rpartition(".")[2], style="cyan"), Text(_words(value), style=style), meaning


def _show_differences(loaded: Loaded) -> None:
    from rich.table import Table
    from rich.text import Text

    from rlcli.config.load import differences, get
    from rlcli.config.settings import table

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("setting", "value", "default", "from"):
        grid.add_column(heading, no_wrap=heading == "setting", overflow="fold")
    missing = [key for key, setting in table(loaded.kind).items() if setting.required and get(loaded.config, key) == setting.default]
    for key, (default, value) in differences(loaded.kind, loaded.config).items():
        shown = "" if table(loaded.kind)[key].required else _words(default)
        grid.add_row(Text(key, style="cyan"), Text(_words(value), style="green"), Text(shown, style="dim"), Text(loaded.sources.get(key, ""), style="dim"))
    for key in missing:
        grid.add_row(Text(key, style="cyan"), Text("to be given", style="red"), "", "")
    _console().print(grid)


def _show_translation(out: Any, output: Path | None) -> None:
    """What became of the old file, on stderr where the recipe itself goes to stdout."""
    from rich.padding import Padding

    console = _console(stderr=output is None)
    console.print(f"\n[bold]{len(out.origin)} settings carried over[/bold], {len(out.settings)} of them different from msrl's defaults")
    for remark in out.remarks:
        console.print(Padding(f"[yellow]·[/yellow] {_plain(remark)}", (0, 0, 0, 2)))
    left = sum(len(keys) for keys in out.left_out.values())
    console.print(f"\n[bold]{left} left out[/bold]")
    for why, keys in sorted(out.left_out.items(), key=lambda item: item[0] != "no counterpart"):
        console.print(Padding(f"[cyan]{_plain(why)}[/cyan]: {_plain(', '.join(key.removeprefix('megatron_training.') for key in keys))}", (0, 0, 0, 2)))
    given = [key for key in ("model", "data.train") if key not in out.settings]
    needed = " ".join(f"{key}=..." for key in given)
    if output is not None:
        console.print(f"\n{output}: try it with  msrl train {out.kind} --recipe {_as_argument(output)} {needed} --dry-run")


def _prove(kind: str, settings: dict[str, Any]) -> None:
    """What `import` writes is always a recipe that loads: a value that msrl does not take is the old file's fault, and is said."""
    from rlcli.config.load import load

    load(kind, None, [f"{key}={_yaml_value(value)}" for key, value in settings.items()], complete=False)


def _yaml_value(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def _target(path: Path, force: bool) -> Path:
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: name it {path.stem or 'mine'}.yaml, so that --recipe takes it for a file")
    if path.exists() and not force:
        raise UserError(f"{path} is there already; --force replaces it")
    return path


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _as_argument(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


def _words(value: Any) -> str:
    """A value as it is written in a recipe."""
    if value == "???":
        return "to be given"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(_words(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
