"""Steps that libraries do, and the trained tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.data import TokenSet
from shardwise.data.prepare.extract import html, language
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.recipe import read_recipe
from shardwise.data.prepare.words import Document, Vocabulary, simple_words, splitter
from shardwise.run.problems import UserError

PAGE = """<html><head><title>T</title></head><body><nav><a href="/">Home</a> <a href="/b">About</a></nav><article><h1>Rivers</h1>
<p>The river flows through the town, and many people live beside it in small houses made of wood and stone.</p>
<p>Every spring the water rises, and the people of the town carry what they own to the upper floors.</p></article>
<footer>Copyright</footer></body></html>"""


@pytest.mark.drawn(group="preparation")
def test_pages_become_text() -> None:
    pytest.importorskip("trafilatura")
    rule = html()
    vocabulary = Vocabulary(simple_words)
    page = Document(PAGE, vocabulary, {"form": "html"})
    assert rule(page) == ""
    assert "flows through the town" in page.text
    assert "About" not in page.text
    assert "<p>" not in page.text
    assert rule(Document("", vocabulary)) == "no text in the page"
    plain = Document("1 < 2 and 3 > 2", vocabulary, {"form": "text"})
    assert (rule(plain), plain.text) == ("", "1 < 2 and 3 > 2")


@pytest.mark.drawn(group="preparation")
def test_languages() -> None:
    pytest.importorskip("py3langid")
    rule = language(keep=["en", "de"])
    vocabulary = Vocabulary(simple_words)
    for text, said in (
        ("The river flows through the town, and many people live beside it.", ""),
        ("Der Fluss fließt durch die Stadt, und viele Menschen wohnen an seinem Ufer.", ""),
        ("La rivière traverse la ville, et beaucoup de gens habitent sur ses rives.", "language fr"),
        ("Река течёт через город, и многие люди живут на её берегах.", "language ru"),
    ):
        assert rule(Document(text, vocabulary)) == said
    with pytest.raises(UserError, match='"english" is no language'):
        language(keep=["english"])


def test_words_of_spacy() -> None:
    spacy = pytest.importorskip("spacy")
    nlp = spacy.blank("en")
    vocabulary = Vocabulary(splitter("spacy/en"))
    text = (
        "Don't (really) go to the U.S.A., it's $5.00; e-mail me@x.org :-) at 10a.m. we'll see...\n\n  'quoted' IS_ALPHA"
    )
    want = [token.text for token in nlp(text.replace("IS_ALPHA", "-")) if token.text.strip()]
    assert list(Document(text, vocabulary).words()) == want


@pytest.mark.drawn(group="preparation")
def test_a_tokenizer_is_trained_on_what_is_left(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = '[[sources]]\nname = "web"\npaths = ["a.jsonl"]\n[tokenizer]\ntrain = 600\n'
    (corpus / "recipe.toml").write_text(recipe)
    for out in ("one", "two"):
        prepare(read_recipe(corpus / "recipe.toml"), corpus, corpus / out, workers=1)
    files = [(corpus / out / "tokenizer/tokenizer.json").read_bytes() for out in ("one", "two")]
    assert files[0] == files[1]
    tokens = TokenSet.open(corpus / "one/tokens/web")
    assert tokens.tokenizer().vocab == 600
    assert tokens.index.text_bytes / tokens.tokens > 1.5
    line = json.loads((corpus / "one/documents/web-000000.jsonl").read_text(encoding="utf-8").splitlines()[0])
    ids = tokens.tokenizer().encode(line["text"])
    assert tokens.tokenizer().decode(ids) == line["text"]
    assert tokens.read(0, len(ids)).tolist() == ids
    (corpus / "recipe.toml").write_text(recipe.replace("600", "100"))
    assert main(["data", "prepare", str(corpus / "recipe.toml"), "--out", str(corpus / "three")]) == 2
    assert "tokenizer.train: 100 is too few" in capsys.readouterr().err
