"""Text a token at a time is the text of all tokens, never half a character, and ends before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers_of_each_kind import KINDS, TEXTS, tokenizer_of

from shardwise.data.tokenizer import Tokenizer
from shardwise.serve.text import Detokenizer, Reader, StopFinder, token_text

any_text = st.text(alphabet=TEXTS, max_size=40) | st.text(max_size=20)


def whole(tokenizer: Tokenizer, tokens: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.add, tokens), detokenizer.end()])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_tokens_one_at_a_time_are_the_text_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, tokenizer.vocab + 3)
    if kind in (
        "sentencepiece",
        "metaspace",
    ):  # see the heading of text.py: of bytes that are no text, they replace more
        ids = ids.filter(lambda token: not 3 <= token < 259)
    drawn = data.draw(st.lists(st.lists(ids, max_size=20) | any_text.map(tokenizer.encode), max_size=4))
    tokens = [token for part in drawn for token in part]
    if kind in ("sentencepiece", "metaspace"):
        assume("\ufffd" not in tokenizer.decode(tokens))
    assert whole(tokenizer, tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", ["byte", "byte-level"])
@given(text=any_text)
def test_what_is_given_are_whole_characters(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer, given_so_far = Detokenizer(tokenizer), ""
    for token in tokenizer.encode(text):
        given_so_far += detokenizer.add(token)
        assert text.startswith(given_so_far)
    assert given_so_far + detokenizer.end() == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_an_answer_goes_on_where_the_prompt_ends(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(data.draw(any_text))
    assume("\ufffd" not in tokenizer.decode(tokens))
    cut = data.draw(st.integers(0, len(tokens)))
    assume("\ufffd" not in tokenizer.decode(tokens[:cut]))
    detokenizer = Detokenizer(tokenizer, tokens[:cut])
    answer = "".join([*map(detokenizer.add, tokens[cut:]), detokenizer.end()])
    assert tokenizer.decode(tokens[:cut]) + answer == tokenizer.decode(tokens)


def cut_at(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is the first to be complete, the longest of them; None where there is none."""
    for end in range(len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))]
    return None


@given(
    parts=st.lists(st.text("ab", max_size=6), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_the_first_stop_string_ends_the_text(parts: list[str], stops: list[str]) -> None:
    finder, given_so_far, text = StopFinder(stops), "", ""
    for part in parts:
        text += part
        given_so_far += finder.add(part)
        cut = cut_at(text, stops)
        assert finder.found == (cut is not None)
        if cut is not None:
            assert given_so_far == cut
            assert finder.add("more") == finder.end() == ""
            return
        held = text[len(given_so_far) :]
        assert text.startswith(given_so_far)
        # No more is held back than could become a stop string, and no less.
        assert held == max((text[at:] for at in range(len(text) + 1) if _begins(text[at:], stops)), key=len)
    assert given_so_far + finder.end() == text


def _begins(text: str, stops: list[str]) -> bool:
    return not text or any(stop.startswith(text) for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_reader_knows_where_tokens_stand(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(data.draw(any_text))
    reader, text, last = Reader(tokenizer), "", 0
    for token in tokens:
        more, place = reader.add(token)
        assert place.start == last == len(text)
        text += more
        last = place.end
        assert last == len(text) == reader.given
    assert text + reader.end() == whole(tokenizer, tokens)


def test_hidden_tokens_end_an_answer_without_text() -> None:
    reader = Reader(tokenizer_of("byte"), ["xy"], hidden=frozenset([ord("!")]))
    assert [reader.add(ord(letter))[0] for letter in "ax!"] == ["a", "", ""]
    assert reader.end() == "x"


def test_half_a_character_in_a_stop_string() -> None:
    reader = Reader(tokenizer_of("byte"), ["日本"])
    given_so_far = "".join(reader.add(byte)[0] for byte in "a日本語".encode())
    assert given_so_far == "a"
    assert reader.stopped
    assert reader.end() == ""


def test_a_token_alone() -> None:
    tokenizer = tokenizer_of("byte")
    assert [token_text(tokenizer, token) for token in (97, 0xE6, 256, 999)] == ["a", "bytes:\\xe6", "<|endoftext|>", ""]
