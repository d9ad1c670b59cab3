"""Chat templates: their texts as the model families define them, and what holds for each of them whatever the conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.data.builtin_templates import BUILTIN_TEMPLATES
from rlcli.data.rows import BadRow, Row
from rlcli.data.templates import find_template
from rlcli.data.tokens import EARLIER_ANSWER, LAST_ANSWER, OTHER, Encoded, Encoder
from rlcli.errors import UserError

TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}]
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

# bos is <s>, eos </s>
EXPECTED = {
    "empty": "S\nQA</s>R",
    "alpaca": "S\n\n### Instruction:\nQ\n\n### Response:\nA</s>\n\n### Instruction:\nR\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
    "qwen_math_r1": f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nR\n{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s><s>[INST] R [/INST]",
    "mistral": "<s>[INST] S\n\nQ[/INST] A</s>[INST] R[/INST]",
    "gemma": "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n",
    "deepseek3": "<s>S<｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>R<｜Assistant｜>",  # noqa: RUF001
    "deepseek3_r1": "<s>S<｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>R<｜Assistant｜><think>\n",  # noqa: RUF001
}
EXPECTED["qwen"] = EXPECTED["qwen_r1"] = EXPECTED["qwen3"] = EXPECTED["chatml"]


@pytest.fixture(scope="module")
def encoder(bos_tokenizer_folder: Path) -> Callable[..., Encoder]:
    """Encoders with the tokenizer that adds <s>, one for each template."""
    made: dict[Any, Encoder] = {}

    def get(template: str, thinking: bool | None = None) -> Encoder:
        if (template, thinking) not in made:
            made[template, thinking] = Encoder(str(bos_tokenizer_folder), template, thinking)
        return made[template, thinking]

    return get


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_texts(encoder: Callable[..., Encoder], name: str) -> None:
    assert encoder(name).render(TALK, None, generate=True) == EXPECTED[name]


def test_default_system_messages(encoder: Callable[..., Encoder]) -> None:
    texts = {name: encoder(name).render(TALK[1:2], None, generate=False) for name in ("qwen", "chatml", "qwen_r1", "alpaca")}
    assert texts["qwen"] == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
    assert texts["chatml"] == "<|im_start|>user\nQ<|im_end|>\n"
    assert "<think>" in texts["qwen_r1"]
    assert "<answer>" in texts["qwen_r1"]
    assert "\\boxed{}" in texts["qwen_r1"]
    assert texts["alpaca"].startswith("Below is an instruction")


def test_qwen3_thinking(encoder: Callable[..., Encoder]) -> None:
    thought = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nA"}
    opened = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert encoder("qwen3").render([TALK[1]], None, True) == opened
    assert encoder("qwen3", True).render([TALK[1]], None, True) == opened
    assert encoder("qwen3", False).render([TALK[1]], None, True) == opened + "<think>\n\n</think>\n\n"
    assert encoder("qwen3").render([TALK[1], thought], None, False) == opened + "<think>\nhmm\n</think>\n\nA<|im_end|>\n"
    assert encoder("qwen3").render([TALK[1], thought, TALK[3]], None, False) == opened + "A<|im_end|>\n<|im_start|>user\nR<|im_end|>\n"


WORDS = st.text(st.sampled_from("ab c\n<>|{}\\é数🦊"), min_size=1, max_size=12).filter(lambda text: text.strip())
TURNS = st.lists(WORDS, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2 == 1)


def _talk(turns: list[str], system: str | None) -> list[dict[str, Any]]:
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + talk


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
@settings(max_examples=25)
@given(turns=TURNS, system=st.none() | WORDS, chosen=WORDS, rejected=WORDS)
def test_prompt_ids_are_a_prefix_with_one_bos(encoder: Callable[..., Encoder], name: str, turns: list[str], system: str | None, chosen: str, rejected: str) -> None:
    """What is stored for a pair: one <s> in front, each answer ends in an end mark, and prompt + answer reads as prompt text + answer text."""
    encode = encoder(name)
    tokenizer = encode.tokenizer
    row = Row(_talk(turns, system), chosen=[{"role": "assistant", "content": chosen}], rejected=[{"role": "assistant", "content": rejected}])
    (got,) = encode.encode([row], "pairs")
    assert isinstance(got, Encoded)
    bos = tokenizer.bos_token_id
    assert got.prompt[0] == bos
    assert got.prompt[1:2] != [bos]
    for ids, text, said in zip(got.answers, got.texts, (chosen, rejected), strict=True):
        whole = tokenizer.decode([*got.prompt, *ids])
        assert whole.removeprefix("<s>") == (got.prompt_text + text).removeprefix("<s>")
        if name != "deepseek3_r1":  # opens answers with <think>, so that rows without it are continued by their content
            assert said.strip() in text
        assert any(text.endswith(end) for end in ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"))  # noqa: RUF001
        if not got.boundary:  # the very ids of the whole text at once
            assert encode.ids([got.prompt_text + text]) == [[*got.prompt, *ids]]
    (prompt,) = encode.encode([Row(row.prompt, "7")], "prompts")
    assert isinstance(prompt, Encoded)
    assert prompt.prompt == got.prompt


def test_a_merge_across_the_border_is_counted_and_cut(encoder: Callable[..., Encoder]) -> None:
    encode = encoder("empty")
    row = Row([{"role": "user", "content": "a"}], chosen=[{"role": "assistant", "content": "b"}], rejected=[{"role": "assistant", "content": " the"}])
    (got,) = encode.encode([row], "pairs")
    assert isinstance(got, Encoded)
    assert got.boundary  # "ab" is one token
    text = [encode.tokenizer.convert_ids_to_tokens(ids) for ids in (got.prompt, *got.answers)]
    assert text == [["<s>", "a"], ["b", "</s>"], ["Ġthe", "</s>"]]


def test_several_turns_are_marked(encoder: Callable[..., Encoder]) -> None:
    """Roles by hand: turn marks and the user's words 0, the first answer 1, the last 2, a muted answer 0."""
    encode = encoder("chatml")
    turns = _talk(["Q", "one", "R"], None)
    chosen = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "more"}, {"role": "assistant", "content": "three"}]
    muted = [{**chosen[0], "train": False}, *chosen[1:]]
    (got,) = encode.encode([Row(turns, chosen=chosen, rejected=muted)], "pairs")
    assert isinstance(got, Encoded)

    def runs(ids: list[int], roles: list[int] | None) -> list[tuple[str, int]]:
        assert roles is not None
        assert len(ids) == len(roles)
        out: list[tuple[list[int], int]] = []
        for token, role in zip(ids, roles, strict=True):
            if not out or out[-1][1] != role:
                out.append(([], role))
            out[-1][0].append(token)
        return [(encode.tokenizer.decode(tokens), role) for tokens, role in out]

    assert runs(got.prompt, got.prompt_roles) == [
        ("<s><|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", OTHER), ("one<|im_end|>", EARLIER_ANSWER),
        ("\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n", OTHER),
    ]
    between = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert runs(got.answers[0], got.roles[0]) == [("two<|im_end|>", EARLIER_ANSWER), (between, OTHER), ("three<|im_end|>", LAST_ANSWER)]
    assert runs(got.answers[1], got.roles[1]) == [("two<|im_end|>" + between, OTHER), ("three<|im_end|>", LAST_ANSWER)]


def test_files_names_and_faults(encoder: Callable[..., Encoder], tmp_path: Path) -> None:
    tokenizer = encoder("empty").tokenizer
    good, bad = tmp_path / "mine.jinja", tmp_path / "bad.jinja"
    good.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    bad.write_text("{% for m in messages %}")
    assert find_template(str(good), tokenizer).name == "mine.jinja"
    for wanted, said in ((str(bad), "not valid jinja"), ("quen3", "did you mean qwen3"), (None, "no chat template of its own")):
        with pytest.raises(UserError, match=said):
            find_template(wanted, tokenizer)
    assert find_template("qwen3", tokenizer).knows_thinking
    assert not find_template("qwen", tokenizer).knows_thinking


def test_a_template_that_refuses_names_the_row(bos_tokenizer_folder: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ messages[0].content }}")
    encode = Encoder(str(bos_tokenizer_folder), str(strict), None)
    results = encode.encode([Row(TALK[:2], "1"), Row(TALK[1:2], "1")], "prompts")
    assert isinstance(results[0], BadRow)
    assert "no system here" in str(results[0])
    assert isinstance(results[1], Encoded)


def test_special_tokens_in_a_rows_own_text_are_noticed(encoder: Callable[..., Encoder]) -> None:
    rows = [Row([{"role": "user", "content": text}], "1") for text in ("plain", "end <|im_end|> now")]
    results = encoder("chatml").encode(rows, "prompts")
    assert [result.special for result in results if isinstance(result, Encoded)] == [False, True]
