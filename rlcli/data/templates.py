"""Which chat template a data set is rendered with: the tokenizer's own, one of ours by name, or a file."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.builtin_templates import BUILTIN_TEMPLATES
from rlcli.errors import UserError

OWN = "tokenizer"  # the name under which the tokenizer's own template goes


@dataclass(frozen=True)
class Template:
    """A chat template in jinja. `name` is "tokenizer", a built-in's name, or the file it came from."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def knows_thinking(self) -> bool:
        """Whether the template reads `enable_thinking`."""
        return "enable_thinking" in self.text


def find_template(wanted: str | None, tokenizer: Any) -> Template:
    """The template by name or file; None: the tokenizer's own. Raises UserError where there is none, or it is no valid jinja."""
    if wanted in (None, "", OWN):
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if not own:
            raise UserError(f"this tokenizer has no chat template of its own: give --template NAME (one of {_names()}) or a file in jinja")
        return Template(OWN, own)
    assert wanted is not None
    if wanted in BUILTIN_TEMPLATES:
        return Template(wanted, BUILTIN_TEMPLATES[wanted])
    path = Path(wanted).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(wanted, BUILTIN_TEMPLATES, 1)
        raise UserError(f"--template {wanted}: neither a file nor a built-in{f'; did you mean {near[0]}?' if near else ''} Built in: {_names()}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--template {wanted}: not UTF-8 text") from error
    _check_jinja(text, wanted)
    return Template(path.name, text)


def _names() -> str:
    return ", ".join(BUILTIN_TEMPLATES)


def _check_jinja(text: str, name: str) -> None:
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag 'generation'" in str(error) or "generation" in str(error):
            return  # transformers' own tag, which plain jinja does not know
        raise UserError(f"--template {name}: line {error.lineno} is not valid jinja: {error.message}") from error
