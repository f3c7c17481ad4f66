"""A run's tokenizer in a Hugging Face folder: which tokens begin, end and pad a text, in the files that transformers reads.

A `tokenizer.json` does not name them; `tokenizer_config.json` and `generation_config.json` do. Published files stay as they are.
The byte tokenizer has no file, so one is made: byte-level BPE without a single merge, whose ids are the bytes.
"""

from __future__ import annotations

from typing import Any

from shardwise.data.pieces import letters_of_bytes
from shardwise.data.tokenizer import BYTE, Tokenizer


def tokenizer_config(tokenizer: Tokenizer, positions: int) -> dict[str, Any]:
    """The `tokenizer_config.json` of a tokenizer, for a model with `positions` positions."""
    names = {f"{role}_token": name for role, (name, _) in tokenizer.special_tokens.items()}
    return {
        # Any tokenizer.json, whatever the model's architecture.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of its special tokens, by the keys of `config.json` and `generation_config.json`."""
    return {f"{role}_token_id": number for role, (_, number) in tokenizer.special_tokens.items()}


def made_tokenizer(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The `tokenizer.json` of the byte tokenizer; None for others, which have their own."""
    if tokenizer.kind != BYTE:
        return None
    ends = [
        {"id": number, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name, number in tokenizer.special_tokens.values()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": ends,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(letters_of_bytes())},
            "merges": [],
        },
    }
