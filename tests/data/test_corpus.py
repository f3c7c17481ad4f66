"""The built-in corpus: text that ships with Python, split by name, cached, and built safely by several
processes."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwise.data import corpus
from shardwise.data.corpus import builtin_corpus, corpus_texts, split
from shardwise.data.shards import TokenSet
from shardwise.run import UserError

SMALL = {f"topic/{i}": f"topic {i} ä" for i in range(30)} | {f"library/{i}.py": f"x = {i}" for i in range(100)}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "corpus_texts", lambda: SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardwise"


def test_texts_are_those_of_python() -> None:
    texts = corpus_texts()
    assert list(texts) == sorted(texts)
    assert "library/os.py" in texts
    assert "library/json/decoder.py" in texts
    assert "topic/assert" in texts
    assert sum(map(len, texts.values())) > 5_000_000
    for part in (
        "/test/",
        "/tests/",
        "site-packages",
        "__pycache__",
        "encodings/cp",
        "_sysconfigdata",
        "topics.py",
    ):
        assert not any(part in name for name in texts)
    assert "library/stringprep.py" not in texts  # tables


def test_split_covers_both_kinds() -> None:
    train, validation = split(SMALL)
    assert sorted(train + validation) == sorted(SMALL)
    assert [sum(name.startswith(kind) for name in validation) for kind in ("topic", "library")] == [2, 5]
    assert split(reversed(list(SMALL))) == (train, validation)
    # Mixed, not one kind after the other.
    assert any(name.startswith("topic") for name in train[:20])
    assert any(name.startswith("library") for name in train[:20])
    assert sorted(split(["topic/a", "library/b"])[1]) == ["library/b", "topic/a"]


def test_built_once(small: Path) -> None:
    folder = builtin_corpus()
    assert folder.parent == small
    version = ".".join(map(str, sys.version_info[:3]))
    assert folder.name.startswith(f"corpus-{version}")
    stamp = (folder / "train" / "index.json").stat().st_mtime_ns
    assert builtin_corpus() == folder
    assert (folder / "train" / "index.json").stat().st_mtime_ns == stamp
    train, validation = TokenSet.open(folder / "train"), TokenSet.open(folder / "validation")
    assert train.documents + validation.documents == len(SMALL)
    first = train.tokenizer().decode(train.read(0, int(train.ends[0])))
    assert first == SMALL[split(SMALL)[0][0]]
    assert train.tokens + validation.tokens == sum(len(t.encode()) + 1 for t in SMALL.values())
    assert [p.name for p in small.iterdir()] == [folder.name]


def test_other_content_gets_another_folder(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_corpus()
    monkeypatch.setattr(corpus, "corpus_texts", lambda: {**SMALL, "topic/new": "new"})
    assert builtin_corpus() != first


def test_a_damaged_cache_is_mended(small: Path) -> None:
    folder = builtin_corpus()
    (folder / "train" / "tokens-00000.bin").write_bytes(b"")
    assert builtin_corpus() == folder
    assert TokenSet.open(folder / "train").documents > 100


def test_losing_the_race_is_fine(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def beaten(source: Path, target: Path) -> None:
        if not target.exists():
            shutil.copytree(source, target)  # another process put its own there a moment earlier
        rename(source, target)

    monkeypatch.setattr(corpus.os, "rename", beaten)
    folder = builtin_corpus()
    assert TokenSet.open(folder / "validation").documents == 7
    assert [p.name for p in small.iterdir()] == [folder.name]


def test_many_at_once(small: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: builtin_corpus(), range(16)))
    assert len(folders) == 1
    assert TokenSet.open(folders.pop() / "train").documents == 123
    assert len(list(small.iterdir())) == 1


def test_where_the_cache_cannot_be_written(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(corpus.tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    assert builtin_corpus().is_relative_to(tmp_path / "temp")
    monkeypatch.setattr(corpus.tempfile, "gettempdir", lambda: str(blocked))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        builtin_corpus()


def test_a_python_without_texts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "corpus_texts", dict)
    with pytest.raises(UserError, match="build a set of your own"):
        builtin_corpus()
