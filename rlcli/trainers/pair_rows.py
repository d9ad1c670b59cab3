"""From prepared preference pairs to training rows: truncation on token ids, degenerate pairs left out and counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlcli.config.schema import PairsConfig
from rlcli.data.clean import STEPS
from rlcli.data.store import Pair, PairSet
from rlcli.errors import UserError
from rlcli.types import TrainRow


def fit(pair: Pair, config: PairsConfig) -> Pair | str:
    """The pair within `max_tokens` (prompt and longer answer together) and `max_prompt_tokens`, or why it is left out.

    drop: whatever is too long. keep_prompt_end: a long prompt loses its beginning, then long answers their end.
    keep_answer_start: a prompt is never cut (too long: left out), long answers lose their end. An answer never becomes empty.
    """
    prompt, longest = len(pair.prompt), max(len(pair.chosen), len(pair.rejected))
    too_long = prompt > config.max_prompt_tokens or prompt + longest > config.max_tokens
    cut = 0
    if too_long:
        if config.truncation == "drop" or (config.truncation == "keep_answer_start" and prompt > config.max_prompt_tokens):
            return "too_long"
        cut = max(prompt - config.max_prompt_tokens, 0)
    room = config.max_tokens - (prompt - cut)
    if room < 1:
        return "no_room_for_answer"
    short = Pair(
        pair.id, pair.prompt[cut:], pair.chosen[:room], pair.rejected[:room],
        pair.prompt_roles[cut:], pair.chosen_roles[:room], pair.rejected_roles[:room], pair.extra,
    )  # fmt: skip
    return degenerate(short, config) or short


def degenerate(pair: Pair, config: PairsConfig) -> str:
    """Why a pair says nothing: nothing to compare, or nothing to train on; "" for a good one."""
    if not len(pair.prompt):
        return "empty_prompt"
    if not len(pair.chosen) or not len(pair.rejected):
        return "empty_answer"
    if np.array_equal(pair.chosen, pair.rejected):
        return "equal_after_truncation"
    if not all(mask.any() for mask in pair.masks(config.train_on)):
        return "no_trained_token"
    return ""


def training_row(pair: Pair, config: PairsConfig) -> TrainRow:
    """[prompt, chosen, rejected], never parted; `mask` says which tokens the loss covers."""
    return TrainRow(pair.prompt, [pair.chosen, pair.rejected], {"mask": list(pair.masks(config.train_on))}, splittable=False)


@dataclass
class Pairs:
    """The usable pairs of a data set, by number from 0; built from the data set as they are asked for."""

    source: PairSet
    config: PairsConfig
    numbers: list[int]  # of the usable ones in the data set
    cut: frozenset[int] = frozenset()  # those of them that lost something to the length limits, as numbers in the data set
    left_out: Counter[str] = field(default_factory=Counter)  # here and in preparation, by why
    fingerprint: str = ""  # of all token ids and masks, in order

    @classmethod
    def of(cls, source: PairSet, config: PairsConfig) -> Pairs:
        """Look at every pair once. Raises UserError where none is usable."""
        numbers, left_out, cut, digest = [], Counter[str](), set[int](), hashlib.sha256()
        for number in range(len(source)):
            pair = source.pair(number)
            fitted = fit(pair, config)
            if isinstance(fitted, str):
                left_out[fitted] += 1
                continue
            numbers.append(number)
            if tokens(fitted) < tokens(pair):
                cut.add(number)
            digest.update(content(fitted, config))
        if not numbers:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            remedy = "raise data.max_tokens, or choose another data.truncation"
            raise UserError(f"{named(source)}: none of its {len(source)} pairs can be trained on ({why}): {remedy}")
        return cls(source, config, numbers, frozenset(cut), left_out + dropped(source), digest.hexdigest())

    def __len__(self) -> int:
        return len(self.numbers)

    def share_cut(self, numbers: Sequence[int]) -> float:
        """Share of some pairs that lost something to the length limits."""
        return sum(self.numbers[number] in self.cut for number in numbers) / max(len(numbers), 1)

    def row(self, number: int) -> TrainRow:
        fitted = fit(self.source.pair(self.numbers[number]), self.config)
        assert isinstance(fitted, Pair)
        return training_row(fitted, self.config)

    def rows(self, numbers: Sequence[int]) -> list[TrainRow]:
        return [self.row(number) for number in numbers]

    def contents(self) -> set[bytes]:
        """A digest of each usable pair, limits and masks aside: of what the rows say."""
        whole = (self.source.pair(number) for number in self.numbers)
        return {hashlib.sha256(b"|".join(part.tobytes() for part in (pair.prompt, pair.chosen, pair.rejected))).digest() for pair in whole}


def dropped(source: PairSet) -> Counter[str]:
    """Rows that the preparation had dropped, by what is said of them; a part set apart for validation has no counts of its own."""
    counts = {} if source.manifest.part == "validation" else source.manifest.counts
    return Counter({f"{said} (when prepared)": counts[name] for name, said in STEPS.items() if counts.get(name)})


def named(source: PairSet) -> str:
    """A data set's folder and the files that it was made of; one of both is what the user knows."""
    return f"{source.folder} (made of {', '.join(source.manifest.settings['input'])})"


def tokens(pair: Pair) -> int:
    return len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def content(pair: Pair, config: PairsConfig) -> bytes:
    """Everything that a pair's log-probs depend on, but for the model."""
    parts = [pair.prompt, pair.chosen, pair.rejected]
    lengths = np.array([len(part) for part in parts], np.int32)
    masks = [mask.astype(np.uint8) for mask in pair.masks(config.train_on)]
    arrays: list[np.ndarray] = [lengths, *parts, *masks]
    return b"".join(array.tobytes() for array in arrays)


def refuse_overlap(train: Pairs, held_out: Pairs) -> None:
    """Raise UserError where held-out pairs are trained on: their measures would say nothing."""
    shared = len(train.contents() & held_out.contents())
    if shared:
        raise UserError(
            f"data.eval={named(held_out.source)}: {shared} of its {len(held_out)} pairs are in the training pairs too; "
            "take them out: msrl data prep ... --exclude FILE"
        )
