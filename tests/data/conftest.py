"""A small trained tokenizer, a sample of texts, and sets made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.shard_writer import ShardWriter
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n" * 5,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "日本語のテキスト、ときどき😀絵文字。",
    "def f(x):\n    return x + 1\n",
    "   leading and trailing   ",
    "one line\r\nanother\r\n",
]


WIDE = 3000


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def trained() -> bytes:
    """The content of a byte-level `tokenizer.json` of 400 tokens, with truncation and padding left on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    library.enable_truncation(8)
    library.enable_padding(length=8)
    return library.to_str().encode()


@pytest.fixture
def tokenizer_file(tmp_path: Path, trained: bytes) -> Path:
    path = tmp_path / "tok" / "tokenizer.json"
    path.parent.mkdir()
    path.write_bytes(trained)
    return path


@pytest.fixture
def json_tokenizer(trained: bytes) -> JsonTokenizer:
    return JsonTokenizer(trained)


@pytest.fixture
def write_set(tmp_path: Path) -> Callable[..., TokenSet]:
    """Write documents, given as lists of token numbers, as a set; of bytes, or where numbers are higher, below WIDE."""

    def write(name: str, documents: Sequence[Sequence[int]], shard_tokens: int = 7) -> TokenSet:
        folder = tmp_path / name
        folder.mkdir()
        ends = np.cumsum([len(d) for d in documents])
        tokenizer = ByteTokenizer()
        if max(map(max, documents)) >= tokenizer.vocab:
            tokenizer.vocab = WIDE
        with ShardWriter(folder, tokenizer, shard_tokens) as writer:
            for document in documents:
                writer.append(np.array(document))
            writer.finish([ends], source=[name])
        return TokenSet.open(folder)

    return write


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, documents: Sequence[str], field: str = "text") -> Path:
        path = tmp_path / name
        lines = [json.dumps({"id": i, field: t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(documents)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
