"""Text to token shards to batches. The order of samples is a function of the seed and the sample index alone. No torch."""

from shardwise.data.batches import IGNORE_INDEX, Batch, Samples, Windows
from shardwise.data.corpus import builtin_corpus, corpus_texts
from shardwise.data.open import Data, open_data
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "ByteTokenizer",
    "Data",
    "JsonTokenizer",
    "Samples",
    "TokenSet",
    "Tokenizer",
    "Windows",
    "builtin_corpus",
    "corpus_texts",
    "load_tokenizer",
    "open_data",
]
