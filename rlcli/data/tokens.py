"""Rows to token ids: the chat template rendered once, tokenised once, with exactly one BOS and a prompt that is a prefix of prompt + answer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.rows import BadRow, Message, Row
from rlcli.data.templates import Template, find_template
from rlcli.errors import UserError

OTHER, EARLIER_ANSWER, LAST_ANSWER = 0, 1, 2  # what a token of a conversation belongs to

# what a tokenizer makes of this tells apart two with the same vocabulary but other merges or normalisation
_PROBE = "The 3 quick   brown foxes\n\n\tjump 12345.678 times; naïve café, 数学は楽しい。 \\frac{1}{2} x_1 = -7 {'a': [0]}  \U0001f98a end"


@contextmanager
def one_thread() -> Iterator[None]:
    """The tokenizer library kept to one thread: worker processes share the cores out among themselves."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a local folder. Raises UserError where the folder or its files are missing or damaged."""
    path = Path(folder).expanduser()
    if not folder:
        raise UserError("no tokenizer: give --tokenizer DIR, the folder of the model to be trained")
    if not path.is_dir():
        raise UserError(f"{folder}: no such folder; the tokenizer must be a local folder (that of the model to be trained)")
    try:
        return _tokenizer_class(path).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{folder}: no tokenizer can be loaded from here ({' '.join(str(error).split())[:160]})") from error


def _tokenizer_class(path: Path) -> Any:
    """tokenizer.json says everything, and the class that reads just it does not import torch: seconds and 400 MiB for every process."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def special_tokens(tokenizer: Any) -> list[str]:
    """Every token that is cut out of text before anything else is done to it: end marks, turn marks, placeholders."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any]:
    """What makes token ids mean the same: hashes of the vocabulary and of a probe text's ids, its size, BOS and EOS.

    The file itself is not hashed: tokenizer.json changes its bytes when it is saved again.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return {
        "vocabulary": hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest(),
        "probe": hashlib.sha256(json.dumps(probe).encode()).hexdigest(),
        "size": len(tokenizer),
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
    }


@dataclass(slots=True)
class Encoded:
    """A row as token ids. `answers`: for prompts none, for pairs chosen and rejected; `roles` say what each token belongs to."""

    prompt_text: str
    prompt: list[int]
    prompt_roles: list[int] | None = None  # only where an earlier answer stands in the prompt (pairs)
    texts: tuple[str, ...] = ()
    answers: tuple[list[int], ...] = ()
    roles: tuple[list[int] | None, ...] = ()  # None: every token belongs to the last answer
    answer: str = ""  # prompts: what the verifiers compare with
    special: bool = False  # the row's own text holds special tokens, which will be taken for the template's
    boundary: bool = False  # the tokenizer would merge across the end of the prompt; the ids part there all the same


class Encoder:
    """Renders and tokenises rows of one data set. The same row gives the same ids in every process and every batch."""

    def __init__(self, folder: str, template: str | None, enable_thinking: bool | None) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.template: Template = find_template(template, self.tokenizer)
        self._options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._bos = self.tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self.tokenizer("a")["input_ids"][:1] == [self._bos]
        self._specials = special_tokens(self.tokenizer)

    # -- text ---------------------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: list[Any] | None, generate: bool) -> str:
        """The conversation as text, with the opening of an answer where `generate`. Raises BadRow where the template refuses it."""
        import jinja2

        plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, tools=tools, chat_template=self.template.text, add_generation_prompt=generate, tokenize=False, **self._options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRow("", "a conversation that the chat template can render", problem=f"it says: {' '.join(str(error).split())[:120]}") from error
        return str(text)

    def _segments(self, row: Row, prompt: str, answer: list[Message]) -> list[tuple[str, int]]:
        """What follows the prompt's text, in pieces, each with what it belongs to."""
        done, messages, pieces = prompt, list(row.prompt), []
        last = max(i for i, message in enumerate(answer) if message["role"] == "assistant")
        for i, message in enumerate(answer):
            if message["role"] == "assistant" and i > 0:
                opened = self.render(messages, row.tools, generate=True)
                pieces.append((self._beyond(done, opened), OTHER))
                done = opened
            messages.append(message)
            whole = self.render(messages, row.tools, generate=False)
            if message["role"] != "assistant":
                pieces.append((self._beyond(done, whole), OTHER))
                done = whole
                continue
            said = whole[len(done) :] if whole.startswith(done) else self._said(whole, message, alone=len(answer) == 1)
            done += said
            mark = OTHER if message.get("train") is False else LAST_ANSWER if i == last else EARLIER_ANSWER
            bare = self._ended(said) if i == last else said.rstrip()
            pieces += [(bare, mark), ("" if i == last else said[len(bare) :], OTHER)]
        return [piece for piece in pieces if piece[0]]

    @staticmethod
    def _beyond(done: str, whole: str) -> str:
        if not whole.startswith(done):
            raise BadRow("", "a conversation whose earlier turns the chat template leaves as they are", problem="it rewrites them when a turn follows")
        return whole[len(done) :]

    @staticmethod
    def _said(whole: str, message: Message, alone: bool) -> str:
        """An answer's text where the template opens answers otherwise than it renders them (an opened <think>): content and ending."""
        content = str(message["content"]).strip()
        at = whole.rfind(content)
        if not alone or not content or at < 0:
            raise BadRow("", "an answer that the chat template renders as it is", problem="the rendered text does not go on from the prompt's")
        return whole[at:]

    def _ended(self, said: str) -> str:
        """The last answer without blanks after its end token, and with an end token where the template gives none."""
        bare = said.rstrip()
        if any(bare.endswith(token) for token in self._specials):
            return bare
        return said + (self.tokenizer.eos_token or "")

    # -- ids ----------------------------------------------------------------------------------------------------------------

    def _raw_ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer.is_fast:  # the library itself, without offsets and masks: twice as fast
            return [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts, each with exactly one BOS in front where the tokenizer knows one."""
        return [self._one_bos(ids) for ids in self._raw_ids(texts)]

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        first = 0
        while ids[first : first + 2] == [self._bos, self._bos]:
            first += 1
        if self._adds_bos and ids[first : first + 1] != [self._bos]:
            return [self._bos, *ids[first:]]
        return ids[first:] if first else ids

    def _tail(self, prompt: str) -> str:
        """The prompt from its last special token on. Tokenizers cut text at special tokens first of all, so that what stands before
        one is tokenised without regard to what follows: the tail alone decides whether the prompt's ids are a prefix."""
        return prompt[max([0, *(prompt.rfind(token) for token in self._specials)]) :]

    def continued(self, prompts: list[str], answers: list[str]) -> list[tuple[list[int], bool]]:
        """Ids of each answer after its prompt, and whether the tokenizer would merge across the border between them.

        Where it would not, these are the ids of the whole text without the prompt's, which are a prefix; where it would, the answer
        is tokenised by itself, as it is when a model continues from the prompt's ids.
        """
        tails = [self._tail(prompt) for prompt in prompts]
        heads = dict(zip(dict.fromkeys(tails), self._raw_ids(list(dict.fromkeys(tails))), strict=True))
        wholes = self._raw_ids([tail + answer for tail, answer in zip(tails, answers, strict=True)])
        out = []
        for tail, whole, answer in zip(tails, wholes, answers, strict=True):
            head = heads[tail]
            merged = whole[: len(head)] != head
            out.append((self._raw_ids([answer])[0] if merged else whole[len(head) :], merged))
        return out

    def encode(self, rows: Sequence[Row], kind: str) -> list[Encoded | BadRow]:
        """Each row as token ids, or the BadRow that says why not; in order."""
        encode = self._encode_prompts if kind == "prompts" else self._encode_pairs
        return encode(rows)

    def _encode_prompts(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        out: list[Encoded | BadRow] = [self._opened(row) for row in rows]
        rendered = [(i, item) for i, item in enumerate(out) if isinstance(item, Encoded) and rows[i].ids is None]
        prompts = [item.prompt_text for _, item in rendered]
        after = self.continued(prompts, [item.answer for _, item in rendered])
        for (_, item), prompt, (_, merged) in zip(rendered, self.ids(prompts), after, strict=True):
            item.prompt, item.boundary = prompt, merged
        return out

    def _opened(self, row: Row) -> Encoded | BadRow:
        if row.ids is not None:
            return self._given(row)
        try:
            text = self.render(row.prompt, row.tools, generate=True)
            return Encoded(text, [], answer=row.answer, special=self._has_special(row))
        except BadRow as bad:
            return bad

    def _has_special(self, row: Row) -> bool:
        said = "\n".join(str(message["content"]) for side in (row.prompt, row.chosen, row.rejected) for message in side)
        return any(token in said for token in self._specials)

    def _given(self, row: Row) -> Encoded | BadRow:
        """A row that came tokenised."""
        assert row.ids is not None
        if any(not 0 <= token < len(self.tokenizer) for ids in row.ids.values() for token in ids):
            return BadRow("", f"token ids below {len(self.tokenizer)}, this tokenizer's size", problem="found others: it was made with another tokenizer")
        text = self.tokenizer.decode(row.ids["prompt"])
        if "chosen" in row.ids:
            sides = [row.ids["chosen"], row.ids["rejected"]]
            return Encoded(text, row.ids["prompt"], texts=tuple(map(self.tokenizer.decode, sides)), answers=tuple(sides), roles=(None, None))
        answer = self.tokenizer.decode(row.ids["answer"], skip_special_tokens=True).strip()
        return Encoded(text, row.ids["prompt"], answer=row.answer or answer)

    def _encode_pairs(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        out = [self._opened(row) for row in rows]
        plans: list[tuple[int, list[list[tuple[str, int]]]]] = []
        for i, row in enumerate(rows):
            item = out[i]
            if isinstance(item, Encoded) and row.ids is None:
                try:
                    plans.append((i, [self._segments(row, item.prompt_text, answer) for answer in (row.chosen, row.rejected)]))
                except BadRow as bad:
                    out[i] = bad
        items = [out[i] for i, _ in plans]
        prompts = [item.prompt_text for item in items if isinstance(item, Encoded)]
        texts = [["".join(piece for piece, _ in side) for side in sides] for _, sides in plans]
        after = [self.continued(prompts, [pair[side] for pair in texts]) for side in (0, 1)]
        for n, (item, ids) in enumerate(zip(items, self.ids(prompts), strict=True)):
            assert isinstance(item, Encoded)
            i, sides = plans[n]
            item.prompt, item.texts = ids, tuple(texts[n])
            item.boundary = after[0][n][1] or after[1][n][1]
            marked = [self._marked(after[side][n][0], sides[side]) for side in (0, 1)]
            item.answers, item.roles = tuple(answer for answer, _ in marked), tuple(roles for _, roles in marked)
            item.prompt_roles = self._prompt_roles(rows[i], item)
        return out

    def _marked(self, ids: list[int], pieces: list[tuple[str, int]]) -> tuple[list[int], list[int] | None]:
        """Ids of an answer with what each belongs to; the pieces of several turns are tokenised one by one, so that borders are exact."""
        if len(pieces) == 1:
            mark = pieces[0][1]
            return ids, None if mark == LAST_ANSWER else [mark] * len(ids)
        parts = list(zip(self._raw_ids([text for text, _ in pieces]), (mark for _, mark in pieces), strict=True))
        return [token for part, _ in parts for token in part], [mark for part, mark in parts for _ in part]

    def _prompt_roles(self, row: Row, item: Encoded) -> list[int] | None:
        """Which tokens of the prompt are earlier answers; none where there are none, or the template rewrites earlier turns."""
        answers = [i for i, message in enumerate(row.prompt) if message["role"] == "assistant" and message.get("train") is not False]
        if not answers:
            return None
        roles = [OTHER] * len(item.prompt)
        for i in answers:
            before = self.render(row.prompt[:i], row.tools, generate=True)
            after = self.render(row.prompt[: i + 1], row.tools, generate=False)
            if not (item.prompt_text.startswith(after) and after.startswith(before)):
                return None
            begin, end = (len(ids) for ids in self.ids([before, after.rstrip()]))
            roles[begin:end] = [EARLIER_ANSWER] * (end - begin)
        return roles
