"""Prepared rows as the model sees them: special tokens visible, what is trained on marked. Lines in rich's markup."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.markup import escape

from rlcli.data.lengths import histogram
from rlcli.data.store import PairSet, PromptSet
from rlcli.data.tokens import special_tokens

OPEN, CLOSE = "⟦", "⟧"  # around what is trained on


def show_prompt(data: PromptSet, i: int, tokenizer: Any) -> list[str]:
    """One prompt: its ids as text, and the answer it is judged by. What is trained on is what the model will write after it."""
    prompt = data.prompt(i)
    lines = [f"[bold]row {i}[/bold]  {len(prompt.token_ids)} tokens", marked(tokenizer, prompt.token_ids.tolist(), [0] * len(prompt.token_ids))]
    lines.append(f"[green]{OPEN}the model's response{CLOSE}[/green]")
    lines.append(f"[dim]answer[/dim] {escape(prompt.answer)}")
    if prompt.extra:
        lines.append(f"[dim]extra[/dim]  {escape(str(prompt.extra))}")
    return lines


def show_pair(data: PairSet, i: int, tokenizer: Any, train_on: str = "last_answer") -> list[str]:
    """One pair: the prompt, then both answers with what is trained on marked."""
    pair = data.pair(i)
    chosen, rejected = pair.masks(train_on)
    lines = [f"[bold]row {i}[/bold]  prompt {len(pair.prompt)}, chosen {len(pair.chosen)}, rejected {len(pair.rejected)} tokens"]
    lines.append(marked(tokenizer, pair.prompt.tolist(), [0] * len(pair.prompt)))
    for name, ids, mask in (("chosen", pair.chosen, chosen), ("rejected", pair.rejected, rejected)):
        lines += [f"[dim]--- {name}[/dim]", marked(tokenizer, ids.tolist(), [int(value) for value in mask])]
    if pair.extra:
        lines.append(f"[dim]extra[/dim]  {escape(str(pair.extra))}")
    return lines


def marked(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> str:
    """Ids as text in markup: special tokens in colour, runs of trained tokens in green between marks."""
    special = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))
    pieces = []
    for trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        inner = ""
        for is_special, tokens in groupby((token for token, _ in run), key=special.__contains__):
            text = escape(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
            inner += f"[magenta]{text}[/magenta]" if is_special else text
        pieces.append(f"[green]{OPEN}{inner}{CLOSE}[/green]" if trained else inner)
    return "".join(pieces)


def length_bars(data: PromptSet | PairSet, width: int = 40) -> list[str]:
    """A histogram of the lengths of each column."""
    lines = []
    for column in ("prompt",) if isinstance(data, PromptSet) else ("prompt", "chosen", "rejected"):
        bars = histogram(data.lengths(column).tolist())
        most = max(count for _, _, count in bars)
        digits = len(f"{bars[-1][1]:,}")
        lines.append(f"[bold]{column}[/bold] [dim]tokens[/dim]")
        for low, high, count in bars:
            filled = round(width * count / most)
            bar = "█" * filled if filled or not count else "▏"
            lines.append(f"  {low:>{digits},} - {high:>{digits},}  [cyan]{bar:<{width}}[/cyan] {count:,}")
    return lines
