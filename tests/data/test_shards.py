"""A set reads back what was written across shard borders, and anything half-written or tampered with is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data import shards
from shardwise.data.shard_writer import ShardWriter
from shardwise.data.shards import TokenSet, dtype_for
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.files import write_atomically
from shardwise.run import UserError

DOCUMENTS = [[1, 2, 3, 256], [4, 256], [*range(10, 30), 256], [5, 6, 256]]
FLAT = [t for d in DOCUMENTS for t in d]


@pytest.fixture
def tokens(write_set: Callable[..., TokenSet]) -> TokenSet:
    return write_set("set", DOCUMENTS)


def test_every_window(tokens: TokenSet) -> None:
    assert len(tokens.index.shards) == 5
    for start in range(len(FLAT) + 1):
        for stop in range(start, len(FLAT) + 1):
            assert tokens.read(start, stop).tolist() == FLAT[start:stop]


def test_reading_outside(tokens: TokenSet) -> None:
    for start, stop in ((-1, 2), (0, len(FLAT) + 1), (5, 4)):
        with pytest.raises(IndexError):
            tokens.read(start, stop)


def test_document_ends(tokens: TokenSet) -> None:
    ends = np.cumsum([len(d) for d in DOCUMENTS]).tolist()
    for start in range(len(FLAT)):
        for stop in range(start, len(FLAT) + 1):
            assert tokens.ends_between(start, stop).tolist() == [e for e in ends if start < e <= stop]


def test_few_shards_are_mapped_at_once(tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAPPED_AT_ONCE", 2)
    assert tokens.read(0, len(FLAT)).tolist() == FLAT
    assert tokens.read(0, 3).tolist() == FLAT[:3]
    assert len(tokens._maps) == 2


def test_dtype_by_vocabulary() -> None:
    assert dtype_for(257) == dtype_for(2**16) == "uint16"
    assert dtype_for(2**16 + 1) == "uint32"


def test_files_are_little_endian(tokens: TokenSet) -> None:
    assert (tokens.folder / "tokens-00000.bin").read_bytes()[:8] == bytes([1, 0, 2, 0, 3, 0, 0, 1])
    assert (tokens.folder / "documents.bin").read_bytes()[:8] == bytes([4, 0, 0, 0, 0, 0, 0, 0])


def test_fingerprint_is_of_the_content(write_set: Callable[..., TokenSet]) -> None:
    first = write_set("a", DOCUMENTS, 7)
    assert write_set("b", DOCUMENTS, 1000).fingerprint == first.fingerprint
    assert write_set("c", [*DOCUMENTS[:3], [5, 7, 256]]).fingerprint != first.fingerprint
    joined = [DOCUMENTS[0] + DOCUMENTS[1], *DOCUMENTS[2:]]
    assert write_set("d", joined).fingerprint != first.fingerprint


def test_without_an_index_it_is_half_written(tokens: TokenSet, tmp_path: Path) -> None:
    (tokens.folder / "index.json").unlink()
    with pytest.raises(UserError, match=r"holds no index\.json.*half"):
        TokenSet.open(tokens.folder)
    with pytest.raises(UserError, match="no such folder"):
        TokenSet.open(tmp_path / "elsewhere")


def test_wrong_sizes_are_all_told(tokens: TokenSet) -> None:
    with open(tokens.folder / "tokens-00001.bin", "ab") as file:
        file.write(b"\0")
    (tokens.folder / "tokens-00003.bin").unlink()
    with pytest.raises(UserError) as caught:
        TokenSet.open(tokens.folder)
    text = str(caught.value)
    assert "tokens-00001.bin: has 15 bytes, and the index says 14" in text
    assert "tokens-00003.bin: is missing" in text


def test_ends_that_disagree(tokens: TokenSet) -> None:
    (tokens.folder / "documents.bin").write_bytes(np.array([1, 2, 3, 4], dtype="<u8").tobytes())
    with pytest.raises(UserError, match="damaged"):
        TokenSet.open(tokens.folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 3}, "version 3, and this shardwise reads version 1 and 2"),
        ({"version": 2, "kind": "songs"}, "does not know"),
        ({"format": "other"}, "not the index of a token set"),
        ({"dtype": "float32"}, "dtype"),
        ({"tokens": -1}, "not a count"),
        ({"tokens": 31}, "do not add up"),
        ({"tokens": True}, "not a count"),
        ({"shards": [["../secret.bin", 30]]}, "outside the folder"),
        ({"shards": [["/etc/passwd", 30]]}, "outside the folder"),
        ({"shards": [["..", 30]]}, "outside the folder"),
        ({"shards": 3}, "damaged"),
        ({"tokenizer": {}}, "damaged"),
    ],
)
def test_an_index_that_cannot_be(tokens: TokenSet, change: dict[str, Any], sentence: str) -> None:
    path = tokens.folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=sentence):
        TokenSet.open(tokens.folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_an_index_that_is_none(tokens: TokenSet, content: str) -> None:
    (tokens.folder / "index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json"):
        TokenSet.open(tokens.folder)


def test_an_interrupted_writer_goes_on(tmp_path: Path, write_set: Callable[..., TokenSet]) -> None:
    whole = write_set("whole", DOCUMENTS)
    folder = tmp_path / "again"
    folder.mkdir()
    with ShardWriter(folder, ByteTokenizer(), 7) as writer:
        writer.append(np.array(FLAT[:17]))
    with pytest.raises(UserError, match="half"):
        TokenSet.open(folder)
    with ShardWriter(folder, ByteTokenizer(), 7) as writer:
        assert writer.finished == 14
        writer.append(np.array(FLAT[14:]))
        index = writer.finish([whole.ends], source=["whole"])
    assert index == whole.index
    assert TokenSet.open(folder).read(0, len(FLAT)).tolist() == FLAT


def test_atomic_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"one")
    write_atomically(tmp_path / "a", b"two")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"two"


def test_a_token_outside_of_the_vocabulary(tokens: TokenSet) -> None:
    name, _ = tokens.index.shards[1]
    (tokens.folder / name).write_bytes(np.full(tokens.index.shards[1][1], 300, "<u2").tobytes())
    first = tokens.index.shards[0][1]
    assert TokenSet.open(tokens.folder).read(0, first).tolist() == FLAT[:first]
    with pytest.raises(UserError, match=rf"token {first} is 300, and the vocabulary has 257: the set is damaged"):
        TokenSet.open(tokens.folder).read(2, first + 2)
