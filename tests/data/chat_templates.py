"""Chat templates written from published formats. What the assistant says stands between ⟦ and ⟧: as a template without blocks the
marks are left out, and as one with them they become `{% generation %}` blocks, for the templates that transformers can judge."""

from __future__ import annotations

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
]  # fmt: skip
"""What the tokenizer of the tests knows as special tokens."""


def _turns(before: str, user: str, assistant: str, system: str = "", after: str = "") -> str:
    """A loop over messages with a line for each role."""
    roles = [("user", user), ("assistant", assistant), *([("system", system)] if system else [])]
    cases = "".join(f"{{% {'if' if n == 0 else 'elif'} m['role'] == '{r}' %}}{t}" for n, (r, t) in enumerate(roles))
    refuse = "{% else %}{{ raise_exception('no such role: ' + m['role']) }}{% endif %}"
    return f"{before}{{% for m in messages %}}{cases}{refuse}{{% endfor %}}{after}"


def _prompted(asking: str, otherwise: str = "") -> str:
    return f"{{% if add_generation_prompt %}}{asking}{f'{{% else %}}{otherwise}' if otherwise else ''}{{% endif %}}"


SAID, TRIMMED = "{{ m['content'] }}", "{{ m['content'] | trim }}"
NEWLINE = "{{ '\\n' }}"

FORMATS: dict[str, tuple[str, str, str]] = {
    # name: (template, beginning-of-text token, end-of-text token)
    "chatml": (
        _turns(
            "",
            f"<|im_start|>user\n{SAID}<|im_end|>{NEWLINE}",
            f"<|im_start|>assistant\n⟦{SAID}<|im_end|>⟧{NEWLINE}",
            f"<|im_start|>system\n{SAID}<|im_end|>{NEWLINE}",
            _prompted(f"<|im_start|>assistant{NEWLINE}"),
        ),
        "",
        "<|im_end|>",
    ),
    "qwen2.5": (
        _turns(
            f"{{% if messages[0]['role'] != 'system' %}}<|im_start|>system\nYou are a helpful assistant.<|im_end|>{NEWLINE}"
            "{% endif %}",
            f"<|im_start|>user\n{SAID}<|im_end|>{NEWLINE}",
            "<|im_start|>assistant\n⟦{{ m.content }}{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
            f"{{{{ call.function | tojson }}}}{{{{ '\\n</tool_call>' }}}}{{% endfor %}}<|im_end|>⟧{NEWLINE}",
            f"<|im_start|>system\n{SAID}<|im_end|>{NEWLINE}",
            _prompted(f"<|im_start|>assistant{NEWLINE}"),
        ),
        "",
        "<|im_end|>",
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set first = '<<SYS>>\\n' + messages[0]['content']"
        " + '\\n<</SYS>>\\n\\n' %}{% else %}{% set rest = messages %}{% set first = '' %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (first if loop.first else '') + m['content'] | trim + ' [/INST]' }}"
        "{% else %}⟦{{ ' ' + m['content'] | trim + ' ' + eos_token }}⟧{% endif %}{% endfor %}",
        "<s>",
        "</s>",
    ),
    "llama3": (
        _turns(
            "{{ bos_token }}",
            f"<|start_header_id|>user<|end_header_id|>\n\n{TRIMMED}<|eot_id|>",
            f"<|start_header_id|>assistant<|end_header_id|>\n\n⟦{TRIMMED}<|eot_id|>⟧",
            f"<|start_header_id|>system<|end_header_id|>\n\n{TRIMMED}<|eot_id|>",
            _prompted("<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"),
        ),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral v1": (
        _turns(
            "{{ bos_token }}",
            f"{{{{ '[INST] ' }}}}{SAID}{{{{ ' [/INST]' }}}}",
            f"⟦{SAID}{{{{ eos_token }}}}⟧{{{{ ' ' }}}}",
        ),
        "<s>",
        "</s>",
    ),
    "mistral v3": (
        _turns("{{ bos_token }}", f"[INST]{{{{ ' ' }}}}{SAID}[/INST]", "⟦{{ ' ' + m['content'] | trim + eos_token }}⟧"),
        "<s>",
        "</s>",
    ),
    "gemma": (
        _turns(
            "{{ bos_token }}",
            f"<start_of_turn>user\n{TRIMMED}<end_of_turn>{NEWLINE}",
            f"<start_of_turn>model\n⟦{TRIMMED}<end_of_turn>⟧{NEWLINE}",
            after=_prompted(f"<start_of_turn>model{NEWLINE}"),
        ),
        "<bos>",
        "<end_of_turn>",
    ),
    "phi3": (
        _turns(
            "",
            f"<|user|>\n{SAID}<|end|>{NEWLINE}",
            f"<|assistant|>\n⟦{SAID}<|end|>⟧{NEWLINE}",
            f"<|system|>\n{SAID}<|end|>{NEWLINE}",
            _prompted(f"<|assistant|>{NEWLINE}", "{{ eos_token }}"),
        ),
        "",
        "<|endoftext|>",
    ),
    "zephyr": (
        _turns(
            "",
            f"<|user|>\n{SAID}{{{{ eos_token }}}}{NEWLINE}",
            f"<|assistant|>\n⟦{SAID}{{{{ eos_token }}}}⟧{NEWLINE}",
            f"<|system|>\n{SAID}{{{{ eos_token }}}}{NEWLINE}",
            _prompted(f"<|assistant|>{NEWLINE}"),
        ),
        "<s>",
        "</s>",
    ),
    "deepseek": (
        _turns(
            "{{ bos_token }}",
            f"User: {SAID}{{{{ '\\n\\n' }}}}",
            "Assistant:⟦{{ ' ' + m['content'] + eos_token }}⟧",
            f"{SAID}{{{{ '\\n\\n' }}}}",
            _prompted("Assistant:"),
        ),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "command-r": (
        _turns(
            "{{ bos_token }}",
            f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{TRIMMED}<|END_OF_TURN_TOKEN|>",
            f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦{TRIMMED}<|END_OF_TURN_TOKEN|>⟧",
            f"<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{TRIMMED}<|END_OF_TURN_TOKEN|>",
            _prompted("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        ),
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "alpaca": (
        _turns(
            "",
            f"### Instruction:\n{SAID}{{{{ '\\n\\n' }}}}",
            f"### Response:\n⟦{SAID}{{{{ eos_token }}}}⟧{{{{ '\\n\\n' }}}}",
            f"{SAID}{{{{ '\\n\\n' }}}}",
            _prompted(f"### Response:{NEWLINE}"),
        ),
        "<s>",
        "</s>",
    ),
    "vicuna": (
        _turns(
            "{{ bos_token }}",
            f"{{{{ 'USER: ' }}}}{SAID}",
            "{{ ' ASSISTANT:' }}⟦{{ ' ' + m['content'] + eos_token }}⟧",
            f"{SAID}{{{{ ' ' }}}}",
            _prompted("{{ ' ASSISTANT:' }}"),
        ),
        "<s>",
        "</s>",
    ),
}
WITHOUT_SYSTEM = ("mistral v1", "mistral v3", "gemma")


def plain(name: str) -> str:
    """The template as published, without generation blocks."""
    return FORMATS[name][0].replace("⟦", "").replace("⟧", "")


def marked(name: str) -> str:
    """The template with generation blocks."""
    return FORMATS[name][0].replace("⟦", "{% generation %}").replace("⟧", "{% endgeneration %}")
