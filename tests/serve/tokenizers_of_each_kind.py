"""Tokenizers of every kind that is served, small: raw bytes, byte-level BPE, sentencepiece with a byte fallback, with a metaspace
decoder, and WordPiece."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

CORPUS = ["hello world, naïve café 😀 日本語 def f(x): return x", "the end of the world is near, the text says"]
TEXTS = "héllo wörld 日本語 😀👍🏽 \n\t def f(x):  return 'ü' ,. ▁ <tool call> é"
END = "</s>"


def byte_level() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=[END, "<|user|>"], show_progress=False
    )
    library.train_from_iterator(CORPUS * 20, trainer)
    library.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return library


def sentencepiece() -> Any:
    """As Llama 2's: ▁ for a blank, a first one put before the text, and bytes for what has no token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    letters = ["▁", *"abcdefhilnortuvwxyz,.():'", "▁the", "▁world", "he", "llo", "hello", "▁▁", "é"]
    names = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("h", "e"), ("▁", "▁")]
    library = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return library


def metaspace() -> Any:
    library = sentencepiece()
    from tokenizers import decoders, normalizers, pre_tokenizers

    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def word_piece() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = ["[UNK]", END, "hello", "world", "##s", "the", ",", ".", "##er", "end"]
    library = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=False)
    library.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    return library


LIBRARIES: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "word-piece": word_piece,
}
KINDS = ("byte", *LIBRARIES)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer by its kind."""
    if kind == "byte":
        return ByteTokenizer()
    return JsonTokenizer(LIBRARIES[kind]().to_str().encode(), end=END)
