"""Chat templates: found where publishers put them, as `transformers` renders them, and unable to leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.chat.template import ChatTemplate, load_template
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.run import UserError
from shardwise.serve.grammar import Form, Grammars
from shardwise.serve.server.model import load_model_files

MESSAGES = [
    {"role": "user", "content": "<a> & 'ü'"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n        {{- bos_token + m.content }}\n"
    "    {%- else %}\n{{ m.content }}{{ eos_token }}\n    {%- endif %}\n{%- endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "switches": "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}{{ messages[-1].content }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro say(x) %}[{{ x | trim }}]{% endmacro %}{% for m in messages %}{{ say(m.content) }}{% endfor %}",
    "tools": "{% if tools %}tools{% endif %}{% if not documents %}none{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, enable_thinking=False, **special
    )
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES, {"enable_thinking": False}) == theirs


def test_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(MESSAGES).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ('{0.__class__}').format(1) }}{{ ''['__class__'] }}{{ self.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}{{ messages[0].update({'a': 1}) }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 1 }}",
    ],
)
def test_nothing_leaves_the_sandbox(source: str) -> None:
    with pytest.raises(UserError, match="the chat template"):
        ChatTemplate(source).render(MESSAGES)


def test_a_template_refuses_with_its_own_words() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


def test_a_template_that_is_none() -> None:
    with pytest.raises(UserError, match=r"x\.jinja: is not a chat template"):
        ChatTemplate("{% for %}", where="x.jinja")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "user: c\nassistant:"),
        ({"chat_template.jinja": "own file"}, "own file"),
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        ({"chat_template.jinja": "own file", "tokenizer_config.json": {"chat_template": "config"}}, "own file"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "r"}]}}, "r"),
        ({"tokenizer_config.json": {"chat_template": []}}, "user: c\nassistant:"),
        ({"tokenizer_config.json": "no object"}, "user: c\nassistant:"),
    ],
    ids=range(9),
)
def test_where_a_template_is_found(tmp_path: Path, files: dict[str, Any], wanted: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if name.endswith("jinja") else json.dumps(content))
    assert load_template(tmp_path, ByteTokenizer()).render(MESSAGES[2:]) == wanted
    (tmp_path / "given").write_text("given {{ eos_token }}")
    assert load_template(tmp_path, ByteTokenizer(), tmp_path / "given").render(MESSAGES) == "given <|endoftext|>"
    with pytest.raises(UserError, match="cannot be read"):
        load_template(tmp_path, ByteTokenizer(), tmp_path / "absent")


def test_what_a_checkpoint_says_of_answers(tmp_path: Path) -> None:
    (tmp_path / "shardwise_tokenizer.json").write_text('{"kind": "byte"}')
    assert load_model_files(tmp_path, "m").ends == {256}
    generation = {"eos_token_id": [256, 10], "temperature": 0.6, "top_p": 7, "top_k": "x", "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = load_model_files(tmp_path, "m")
    assert (model.ends, model.recommended, model.first) == ({10, 256}, {"temperature": 0.6}, 256)


def test_ends_that_are_no_tokens_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "shardwise_tokenizer.json").write_text('{"kind": "byte"}')
    for ends in (-1, [-1, 10], [True, 10**12, 10], "</s>"):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        model = load_model_files(tmp_path, "m")
        grammar = Grammars(model.tokenizer, 300, model.ends).make(Form("regex", "a"), 1)[0]
        grammar.accept(ord("a"))
        bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == ([10, 256] if isinstance(ends, list) else [256])
