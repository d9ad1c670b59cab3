"""Which rows stay: empty ones, repetitions, conflicts, overlap with held-out rows, and the share set apart for validation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlcli.data.rows import Row, text_of

# The steps in the order in which a row meets them; a row that is dropped is counted at the first that drops it.
STEPS = {
    "bad": "could not be read",
    "empty_prompt": "empty prompt",
    "empty_answer": "empty answer",
    "same_answers": "chosen equal to rejected",
    "exact_duplicate": "repeat an earlier row exactly",
    "near_duplicate": "repeat an earlier row but for whitespace",
    "conflict": "same prompt, another answer",
    "excluded_exact": "equal a held-out row",
    "excluded_near": "nearly equal a held-out row",
    "not_rendered": "refused by the chat template",
    "long_prompt": "prompt too long",
    "long": "prompt and answer too long",
}

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_", re.UNICODE)


def digest(text: str) -> bytes:
    """16 bytes that stand for a text, the same in every process."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def normal(text: str) -> str:
    """A text with runs of whitespace as single blanks."""
    return " ".join(text.split())


def prompt_text(row: Row) -> str:
    """The prompt as one text; of a tokenised row, its ids."""
    return text_of(row.prompt) if row.ids is None else " ".join(map(str, row.ids["prompt"]))


def answer_text(row: Row) -> str:
    """What stands against the prompt: the answer, or both answers of a pair."""
    if row.ids is not None:
        return "\x1d".join(" ".join(map(str, row.ids[key])) for key in ("answer", "chosen", "rejected") if key in row.ids)
    return row.answer if not row.chosen else f"{text_of(row.chosen)}\x1d{text_of(row.rejected)}"


@dataclass
class Conflict:
    """One prompt that came with different answers."""

    prompt: str
    answers: list[str]
    rows: list[tuple[int, int]]  # (file, number)


class Duplicates:
    """Remembers every row by 16-byte hashes: some 500 bytes a distinct row, whatever its length.

    Rows with the same prompt and another answer are not repetitions: they are kept apart, and reported as conflicts.
    For pairs another pair of answers to the same prompt is simply another row.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._exact: set[bytes] = set()
        self._prompts: set[bytes] = set()
        self._near: set[bytes] = set()
        self._first: dict[bytes, int] = {}  # prompt -> where its first row stands, as one number to save memory
        self.conflicts: dict[bytes, list[tuple[int, int]]] = {}  # prompt -> rows, the first one included

    @property
    def prompts(self) -> int:
        """Distinct prompts seen."""
        return len(self._prompts)

    @property
    def normal_prompts(self) -> int:
        """Distinct prompts seen, whitespace aside."""
        return len(self._first)

    def see(self, row: Row) -> str | None:
        """"exact_duplicate" or "near_duplicate" where an earlier row was the same; else None, and the row is remembered."""
        prompt, answer = prompt_text(row), answer_text(row)
        exact = digest(f"{prompt}\x1c{answer}")
        if exact in self._exact:
            return "exact_duplicate"
        self._exact.add(exact)
        key = digest(prompt)
        self._prompts.add(key)
        plain, plain_answer = normal(prompt), normal(answer)
        near = exact if (plain, plain_answer) == (prompt, answer) else digest(f"{plain}\x1c{plain_answer}")
        if near in self._near:
            return "near_duplicate"
        self._near.add(near)
        self._note(key if plain == prompt else digest(plain), row)
        return None

    @staticmethod
    def key(row: Row) -> bytes:
        """What stands for a row's prompt in `conflicts`."""
        return digest(normal(prompt_text(row)))

    def _note(self, prompt: bytes, row: Row) -> None:
        first = self._first.setdefault(prompt, row.file << 48 | row.number)
        place = (row.file, row.number)
        if self._kind == "prompts" and (first_place := (first >> 48, first & (1 << 48) - 1)) != place:
            self.conflicts.setdefault(prompt, [first_place]).append(place)


def question(row: Row) -> str:
    """What the user asked last: what held-out rows are compared by."""
    return next((str(message["content"]) for message in reversed(row.prompt) if message["role"] == "user"), "")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def ngrams(tokens: list[str], n: int) -> set[int]:
    """Hashes of all n-grams of a list of words; of a shorter list, none."""
    return {int.from_bytes(digest("\x1f".join(tokens[i : i + n]))[:8], "little") for i in range(len(tokens) - n + 1)}


@dataclass
class HeldOut:
    """Questions that training rows must not contain.

    A row is nearly equal to a held-out one if at least `share` of either's n-grams (n words) are in the other. N-grams that only
    frame the question (an instruction that stands in more than half of the held-out rows) do not count.
    """

    n: int = 13
    share: float = 0.5
    _exact: set[bytes] = field(default_factory=set)
    _grams: dict[int, list[int]] = field(default_factory=dict)  # n-gram -> held-out rows that have it
    _sizes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, questions: Iterable[str], n: int, share: float) -> HeldOut:
        held = cls(n, share)
        sets = [held._take(text) for text in questions]
        often: dict[int, int] = {}
        for grams in sets:
            for gram in grams:
                often[gram] = often.get(gram, 0) + 1
        frame = {gram for gram, count in often.items() if count > max(1, len(sets) // 2)}
        for number, grams in enumerate(sets):
            own = grams - frame
            held._sizes.append(len(own))
            for gram in own:
                held._grams.setdefault(gram, []).append(number)
        return held

    def __len__(self) -> int:
        return len(self._sizes)

    def _take(self, text: str) -> set[int]:
        self._exact.add(digest(" ".join(words(text))))
        return ngrams(words(text), self.n)

    def find(self, text: str) -> str | None:
        """"excluded_exact", "excluded_near" or None."""
        tokens = words(text)
        if digest(" ".join(tokens)) in self._exact:
            return "excluded_exact"
        mine = ngrams(tokens, self.n)
        hits: dict[int, int] = {}
        for gram in mine:
            for number in self._grams.get(gram, ()):
                hits[number] = hits.get(number, 0) + 1
        for number, count in hits.items():
            if count >= self.share * self._sizes[number] or count >= self.share * len(mine):
                return "excluded_near"
        return None


def in_validation(row: Row, share: float, seed: int) -> bool:
    """Whether a row goes to the validation part: by a hash of its prompt, so that one prompt never stands on both sides."""
    if share <= 0.0:
        return False
    value = int.from_bytes(digest(f"{seed}\x1c{normal(prompt_text(row))}")[:8], "little")
    return value < share * 2**64
