"""The bytes that a single token of a `tokenizer.json` adds to a text, so that text can be made a token at a time.

Tokens end in the middle of characters, so a piece is bytes, not text. Byte-level BPE writes each byte as a letter, which is read
back here; `<0x0A>` of a byte fallback is its byte. Of all other kinds the library says it: what the token adds behind another one.
Only the first token of a text may differ, where a decoder strips the blank that sentencepiece puts there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def letters_of_bytes() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`): its own where it can be seen, the others in
    their order from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


class Pieces:
    """The pieces of one tokenizer, each made when it is first asked for. Special tokens, and ids without a token, have none."""

    def __init__(self, library: Any, decoder: dict[str, Any] | None, special: frozenset[int]) -> None:
        """`decoder` is that of the file, `special` what is left out of texts."""
        self._library = library
        self._special = special
        kinds = set(_kinds(decoder))
        self._bytes = {letter: byte for byte, letter in enumerate(letters_of_bytes())} if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._anchor, self._anchor_text = self._find_anchor()
        self._inner: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}

    def __call__(self, token: int, first: bool = False) -> bytes:
        """What a token adds to a text, or begins it with."""
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
        # A decoder may change the end of the text before it, as WordPiece does with blanks before a full stop; that is kept.
        return self._library.decode([self._anchor, token])[len(self._anchor_text) :].encode()

    def _find_anchor(self) -> tuple[int | None, str]:
        """A token that other tokens can stand behind, of letters, so that it is not itself changed by them."""
        if self._bytes:
            return None, ""
        for name, token in sorted(self._library.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
            if name.isalpha() and token not in self._special and (text := self._library.decode([token])).isalpha():
                return token, text
        return None, ""


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The kinds of a decoder's steps."""
    if decoder is not None:
        yield decoder["type"]
        for step in decoder.get("decoders", ()):
            yield from _kinds(step)
