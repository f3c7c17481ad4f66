"""Which tokens of a conversation are learned: as transformers marks them for published templates, with and without blocks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from chat_templates import FORMATS, SPECIAL, WITHOUT_SYSTEM, marked, plain

from shardwise.data.chat.messages import BadRow
from shardwise.data.chat.rows import Dialog
from shardwise.data.chat.spans import Renderer
from shardwise.data.chat.template import PLAIN, ChatTemplate
from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer

WORDS = [
    "Hello there",
    " spaced ",
    "two\nlines",
    "naïve café",
    "日本語",
    "x = {'a': 1}",
    "1 + 1 = 2",
    "<b>&amp;</b>",
    "end.",
    "😀 ok",
]


@pytest.fixture(scope="module")
def library() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return made


@pytest.fixture(scope="module")
def tokenizer(library: Any) -> JsonTokenizer:
    return JsonTokenizer(library.to_str().encode())


def conversations(name: str) -> list[list[dict[str, Any]]]:
    rng = random.Random(name)
    found = []
    for turns in (1, 1, 2, 3, 4):
        system = (
            [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 and name not in WITHOUT_SYSTEM else []
        )
        talk = [{"role": r, "content": rng.choice(WORDS)} for _ in range(turns) for r in ("user", "assistant")]
        found.append(system + talk)
    return found


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_as_transformers_marks_them(name: str, blocks: bool, library: Any, tokenizer: JsonTokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    _, bos, eos = FORMATS[name]
    special = {"eos_token": eos, **({"bos_token": bos} if bos else {})}
    theirs = PreTrainedTokenizerFast(tokenizer_object=library, **special)
    template = ChatTemplate(marked(name) if blocks else plain(name), special)
    assert template.has_blocks == blocks
    renderer = Renderer(template, sorted(tokenizer.added))
    for messages in conversations(name):
        text, spans = renderer.whole(Dialog(tuple(messages)))
        ((ids, mask),) = tokenizer.encode_spans([text], [spans])
        expected = theirs.apply_chat_template(
            messages, chat_template=marked(name), return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == expected["assistant_masks"]
        assert 0 < mask.sum() < len(mask)


def test_calls_of_tools(tokenizer: JsonTokenizer) -> None:
    from shardwise.data.chat.messages import tidy_messages

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = tidy_messages(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}], "messages"
    )
    text, ((start, stop),) = Renderer(ChatTemplate(plain("qwen2.5")), SPECIAL).whole(Dialog(tuple(messages)))
    assert text[start:stop] == '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("blocks", [False, True])
def test_which_answers_are_learned(blocks: bool) -> None:
    talk = tuple({"role": r, "content": f"{r}{n}"} for n in range(3) for r in ("user", "assistant"))
    template = ChatTemplate((marked if blocks else plain)("chatml"))

    def learned(dialog: Dialog, **options: Any) -> list[str]:
        text, spans = Renderer(template, SPECIAL, **options).whole(dialog)
        return [text[start:stop].removesuffix("<|im_end|>") for start, stop in spans]

    assert learned(Dialog(talk)) == ["assistant0", "assistant1", "assistant2"]
    assert learned(Dialog(talk, first=4)) == ["assistant2"]
    assert learned(Dialog(talk), learn="last") == ["assistant2"]
    weighted = tuple(m | ({"weight": 0} if n == 3 else {}) for n, m in enumerate(talk))
    assert learned(Dialog(weighted)) == ["assistant0", "assistant2"]
    with pytest.raises(BadRow, match="no message of the assistant"):
        learned(Dialog(talk[:1]))


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_history_is_refused_by_message() -> None:
    talk = tuple({"role": r, "content": "abc"} for _ in range(2) for r in ("user", "assistant"))
    with pytest.raises(BadRow, match=r"goes on; --learn last .*: message 2, '<think>"):
        Renderer(ChatTemplate(THINKING), SPECIAL).whole(Dialog(talk))
    text, ((start, stop),) = Renderer(ChatTemplate(THINKING), SPECIAL, "last").whole(Dialog(talk))
    assert text[start:stop] == "<think></think>abc<|im_end|>"
    asks_otherwise = ChatTemplate(plain("chatml").replace("<|im_start|>assistant{{ '\\n' }}", "<|im_start|>bot\n"))
    with pytest.raises(BadRow, match="before an answer"):
        Renderer(asks_otherwise, SPECIAL).whole(Dialog(talk))
    with pytest.raises(BadRow, match="refuses"):
        Renderer(ChatTemplate(plain("llama2")), SPECIAL).whole(Dialog(talk[1:]))


def test_blocks_inside_of_macros_and_characters_of_none() -> None:
    source = "{% macro say(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
    template = ChatTemplate(source + "{% for m in messages %}{{ say(m) | upper }}{% endfor %}")
    assert template.render_blocks([{"content": "ab"}, {"content": "c"}]) == ("[AB][C]", [(1, 3), (5, 6)])
    with pytest.raises(Exception, match="U\\+FDD0"):
        template.render_blocks([{"content": "a\ufdd0"}])


def test_a_character_of_several_tokens_is_learned_whole(library: Any, tokenizer: JsonTokenizer) -> None:
    text = "a𝄞b"
    ((ids, mask),) = tokenizer.encode_spans([text], [[(1, 2)]])
    assert mask.sum() == len(ids) - 2 >= 2
    assert mask[[0, -1]].tolist() == [0, 0]
    ((ids, mask),) = ByteTokenizer().encode_spans([text], [[(1, 2), (2, 2)]])
    assert mask.tolist() == [0, 1, 1, 1, 1, 0]


def test_random_spans_against_offsets(tokenizer: JsonTokenizer) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        text = "".join(rng.choice(WORDS) for _ in range(4))
        start, stop = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        ((_, mask),) = tokenizer.encode_spans([text], [[(start, stop)]])
        offsets = tokenizer._library.encode(text, add_special_tokens=False).offsets
        assert mask.tolist() == [int(max(a, start) < min(b, stop)) for a, b in offsets]


def test_without_a_template_lines_are_learned() -> None:
    talk = tuple({"role": r, "content": "x"} for _ in range(2) for r in ("user", "assistant"))
    text, spans = Renderer(ChatTemplate(PLAIN), ()).whole(Dialog(talk))
    assert [text[start:stop] for start, stop in spans] == [" x\n", " x\n"]
