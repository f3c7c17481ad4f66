"""Incremental text from tokens: no incomplete characters, and nothing that may still become the beginning of a stop string.

Returned text is never taken back. The pieces together equal `Tokenizer.decode` of all tokens at once (except for bytes that are
not valid UTF-8, where a byte fallback of the tokenizers library replaces more). The text ends where the first stop string to be
complete begins. Stop strings are matched one character at a time (Knuth, Morris and Pratt), so a long one costs no more than a
short one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.data.tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The characters that are complete after each token of a sequence."""

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        """`before` are the tokens of the prompt, whose text is not returned; they matter because the first token of a text may
        decode differently."""
        self._piece = tokenizer.piece
        self._first = not any(map(self._piece, before))
        self._decoder = _DECODER(errors="replace")

    def add(self, token: int) -> str:
        """The characters that a token completes."""
        if self._first:
            self._first = not self._piece(token)
            return self._decoder.decode(self._piece(token, True))
        return self._decoder.decode(self._piece(token))

    def end(self) -> str:
        """The replacement characters for the bytes of an unfinished character."""
        return self._decoder.decode(b"", True)


class StopFinder:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first: if two end at the same character, the one that began earlier wins.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that cannot belong to a stop string any more. After `found`, returns nothing."""
        if not self._stops or self.found:
            return "" if self.found else text
        whole = self._held + text
        for at, letter in enumerate(text, len(self._held) + 1):
            for number, stop in enumerate(self._stops):
                if self._advance(number, letter) == len(stop):
                    self.found, self._held = True, ""
                    return whole[: at - len(stop)]
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain]

    def end(self) -> str:
        """The held-back text, once no more tokens come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, number: int, letter: str) -> int:
        """How many characters of a stop string the text ends with, after one more character."""
        stop, fallback, matched = self._stops[number], self._fallbacks[number], self._matched[number]
        while matched and stop[matched] != letter:
            matched = fallback[matched - 1]
        if stop[matched] == letter:
            matched += 1
        self._matched[number] = matched
        return matched


def _fallback(stop: str) -> list[int]:
    """For each prefix of a string, the length of its longest proper prefix that is also its suffix."""
    table, matched = [0], 0
    for letter in stop[1:]:
        while matched and stop[matched] != letter:
            matched = table[matched - 1]
        if stop[matched] == letter:
            matched += 1
        table.append(matched)
    return table


@dataclass(frozen=True)
class Place:
    """The position of a token in a text: the number of complete characters before it, and after it."""

    start: int
    end: int


class Reader:
    """The text of one answer: characters, stop strings, and the position of each token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        before: Iterable[int] = (),
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """`hidden` are tokens without text: those that end an answer."""
        self._detokenizer = Detokenizer(tokenizer, before)
        self._finder = StopFinder(stops)
        self._hidden = hidden
        self._length = 0
        self.given = 0
        """Characters returned so far."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; later tokens are not part of the answer."""
        return self._finder.found

    def add(self, token: int) -> tuple[str, Place]:
        """The text that is certain after a token, and the token's position."""
        text = "" if token in self._hidden else self._detokenizer.add(token)
        start = self._length
        self._length += len(text)
        return self._give(self._finder.add(text)), Place(start, self._length)

    def end(self) -> str:
        """The rest of the text."""
        last = self._finder.add(self._detokenizer.end())
        return self._give(last if self.stopped else last + self._finder.end())

    def _give(self, text: str) -> str:
        self.given += len(text)
        return text


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, as OpenAI writes it: its text, its name, or its bytes if they are not text."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode() or tokenizer.name(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
