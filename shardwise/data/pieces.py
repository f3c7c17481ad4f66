"""The bytes that a single token of a `tokenizer.json` adds to a text, so that text can be streamed token by token.

Tokens may end in the middle of a character, so a piece is bytes, not text. Byte-level BPE writes each byte as a letter, which is
mapped back here; a byte-fallback token such as `<0x0A>` is its byte. For all other kinds the library decodes the token after
another one, and the added text is the piece. Only the first token of a text may differ, where a decoder strips the blank that
sentencepiece puts there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def letters_of_bytes() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`): a printable byte is its own letter, the
    others are numbered in order from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


class Pieces:
    """The pieces of one tokenizer, each computed on first use. Special tokens and ids without a token have empty pieces."""

    def __init__(self, library: Any, decoder: dict[str, Any] | None, special: frozenset[int]) -> None:
        """`decoder` is the decoder of `tokenizer.json`, `special` the ids that are left out of texts."""
        self._library = library
        self._special = special
        kinds = set(_kinds(decoder))
        self._bytes = {letter: byte for byte, letter in enumerate(letters_of_bytes())} if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._anchor, self._anchor_text = self._find_anchor()
        self._inner: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}

    def __call__(self, token: int, first: bool = False) -> bytes:
        """The bytes that a token appends to a text, or starts it with if `first`."""
        known = self._first if first else self._inner
        piece = known.get(token)
        if piece is None:
            piece = known[token] = self._piece(token, first)
        return piece

    def _piece(self, token: int, first: bool) -> bytes:
        name = self._library.id_to_token(token) if 0 <= token < 2**32 else None
        if name is None or token in self._special:
            return b""
        if self._bytes:
            found = [self._bytes.get(letter, -1) for letter in name]
            return name.encode() if -1 in found else bytes(found)
        if self._falls_back and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        if first or self._anchor is None:
            return self._library.decode([token]).encode()
        # A decoder may change the end of the preceding text, as WordPiece does with blanks before a full stop; text
        # already returned stays as it is.
        return self._library.decode([self._anchor, token])[len(self._anchor_text) :].encode()

    def _find_anchor(self) -> tuple[int | None, str]:
        """A token that other tokens can follow. It consists of letters, so that they do not change it."""
        if self._bytes:
            return None, ""
        for name, token in sorted(self._library.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
            if name.isalpha() and token not in self._special and (text := self._library.decode([token])).isalpha():
                return token, text
        return None, ""


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The types of a decoder's steps."""
    if decoder is not None:
        yield decoder["type"]
        for step in decoder.get("decoders", ()):
            yield from _kinds(step)
