"""Chat templates by name, for tokenizers that have none and for those who want another. Jinja, rendered by transformers.

Each is written from the public description of a model family's prompt format and takes `messages` and `add_generation_prompt`;
`qwen3` takes `enable_thinking` too. `system` stands for the system message's text, where a family folds it into the first user turn.
"""

# ruff: noqa: RUF001 - the wide bars are DeepSeek's own markers
from __future__ import annotations

_BOS = "{{ bos_token or '' }}"
_EOS = "{{ eos_token or '' }}"
_BOXED = "\\nPlease reason step by step, and put your final answer within \\\\boxed{}."
_THINK_SYSTEM = (
    "You answer in two parts. First think the question through between <think> and </think>; "
    "then give the reply itself between <answer> and </answer>, with the final result within \\\\boxed{}."
)
_ALPACA_SYSTEM = "Below is an instruction that describes a task. Write a response that appropriately completes the request."

# one turn of ChatML; ASSISTANT_TEXT, SUFFIX and OPENING are filled in by _chatml
_CHATML_TURNS = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{% ANSWER %}
{%- for call in message.tool_calls or [] -%}{{ '\\n<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% SUFFIX %}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{% OPENING %}{%- endif -%}
"""

_PLAIN_ANSWER = "{{ message.content }}"

# thinking is kept where it stands in the last answer and taken out of earlier ones
_QWEN3_ANSWER = """
{%- set thought = message.reasoning_content or '' -%}{%- set said = message.content -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.last -%}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif -%}{{ said }}
"""
_QWEN3_OPENING = "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"


def _chatml(system: str = "", suffix: str = "", answer: str = _PLAIN_ANSWER, opening: str = "") -> str:
    """ChatML with a system message for rows without one, and a text after the last user turn."""
    head = "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\n" + system + "<|im_end|>\\n' }}{%- endif -%}" if system else ""
    # the last user turn may be followed by the answer, when a whole conversation is rendered
    tail = (
        "{%- if message.role == 'user' and (loop.last or (loop.revindex0 == 1 and messages[-1].role == 'assistant')) -%}{{ '"
        + suffix + "' }}{%- endif -%}"
    ) if suffix else ""
    turns = _CHATML_TURNS.replace("{% ANSWER %}", answer.strip()).replace("{% SUFFIX %}", tail).replace("{% OPENING %}", opening)
    return head + turns.strip()


_SYSTEM_APART = "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}{%- else -%}{%- set system = '' -%}{%- endif -%}"

_ALPACA = """
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- else -%}{{ 'PREFACE\\n\\n' }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'assistant' -%}{{ '### Response:\\n' + message.content + (eos_token or '') + '\\n\\n' }}
{%- else -%}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}
""".strip().replace("PREFACE", _ALPACA_SYSTEM)

_EMPTY = """
{%- for message in messages -%}
{{ message.content }}{%- if message.role == 'assistant' -%}{{ eos_token or '' }}{%- elif not loop.last and loop.nextitem.role != 'assistant' -%}{{ '\\n' }}{%- endif -%}
{%- endfor -%}
""".strip()

_LLAMA3 = (_BOS + """
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
""").strip()

_LLAMA2 = ("""
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'assistant' -%}{{ ' ' + message.content | trim + ' ' + (eos_token or '') }}
{%- else -%}
{%- set head = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '' -%}
{{ (bos_token or '') + '[INST] ' + head + message.content | trim + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
""").strip()

_MISTRAL = (_BOS + """
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'assistant' -%}{{ ' ' + message.content + (eos_token or '') }}
{%- else -%}{{ '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message.content + '[/INST]' }}{%- endif -%}
{%- endfor -%}
""").strip()

_GEMMA = (_BOS + """
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' + role + '\\n' + (system + '\\n\\n' if loop.first and system else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""").strip()


def _deepseek(opening: str = "") -> str:
    return _SYSTEM_APART + _BOS + "{{ system }}" + (
        "{%- for message in messages if message.role != 'system' -%}"
        "{%- if message.role == 'assistant' -%}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}"
        "{%- else -%}{{ '<｜User｜>' + message.content }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>" + opening + "' }}{%- endif -%}"
    )


BUILTIN_TEMPLATES: dict[str, str] = {
    "empty": _EMPTY,
    "alpaca": _ALPACA,
    "chatml": _chatml(),
    "qwen": _chatml(system="You are a helpful assistant."),
    "qwen_r1": _chatml(system=_THINK_SYSTEM),
    "qwen_math_r1": _chatml(system="You are a helpful assistant.", suffix=_BOXED),
    "qwen3": _chatml(answer=_QWEN3_ANSWER, opening=_QWEN3_OPENING),
    "deepseek3": _deepseek(),
    "deepseek3_r1": _deepseek("<think>\\n"),
    "llama2": _SYSTEM_APART + _LLAMA2,
    "llama3": _LLAMA3,
    "mistral": _SYSTEM_APART + _MISTRAL,
    "gemma": _SYSTEM_APART + _GEMMA,
}
