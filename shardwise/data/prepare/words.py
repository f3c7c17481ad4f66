"""Words of documents as ids: a document is split once, and every filter reads arrays of ids instead of strings.

Text is split at blanks into chunks, and the words of a chunk are looked up, since most chunks were seen before. So a document
costs one look-up per chunk, and the properties of a word that filters need (its length, whether it is a symbol) are computed once
per word. Tables are emptied when they grow large, so memory does not grow with the corpus; results never depend on the tables'
content.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.run.problems import Problem, UserError

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]
MOST_WORDS = 2**17
BASE = np.uint64(0x9E3779B97F4A7C15)
"""The base of the polynomial that hashes a run of letters, modulo 2^64; odd, so that it has an inverse."""
INVERSE = np.uint64(pow(int(BASE), -1, 2**64))

CONTROL = "".join(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
PUNCTUATION = "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»" + CONTROL
"""Characters that CCNet (Wenzek et al. 2020) and after it FineWeb count as punctuation besides the ends of sentences."""
# The characters with Unicode's property Sentence_Terminal, as listed in FineWeb's filter, of all scripts.
TERMINAL = frozenset(
    "!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕៖៙៚᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼⹓⹔。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡"
    "𐩖𐩗𐽕𐽖𐽗𐽘𐽙𐾆𐾇𐾈𐾉𑁇𑁈𑂾𑂿𑃀𑃁𑅁𑅂𑅃𑇅𑇆𑇍𑇞𑇟𑈸𑈹𑈻𑈼𑊩𑑋𑑌𑗂𑗃𑗉𑗊𑗋𑗌𑗍𑗎𑗏𑗐𑗑𑗒𑗓𑗔𑗕𑗖𑗗𑙁𑙂𑜼𑜽𑜾𑥄𑥆𑩂𑩃𑪛𑪜𑱁𑱂𑻷𑻸𑽃𑽄𖩮𖩯𖫵𖬷𖬸𖭄𖺘𛲟𝪈"
)
SYMBOLS = frozenset(PUNCTUATION) | TERMINAL

_SIMPLE = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:[.,،٫⎖⎗⎘]\d+)?")
_TO_BLANKS = str.maketrans(PUNCTUATION, " " * len(PUNCTUATION))


Split = Callable[[list[str]], list[list[str]]]
"""Splits chunks of text, which contain no blanks, each into its words."""


def simple_words(chunks: list[str]) -> list[list[str]]:
    """Split into runs of letters and digits, with apostrophes inside words; every other sign is a word by itself."""
    return list(map(_SIMPLE.findall, chunks))


def spacy_words(language: str) -> Split:
    """spaCy's rules for a language. They too work on the chunks between blanks, so chunks may be split outside their text."""
    try:
        import spacy
    except ModuleNotFoundError:
        raise UserError(Problem(f'"spacy/{language}" needs spaCy: pip install spacy', "words")) from None
    try:
        tokenizer = spacy.blank(language).tokenizer
    except ImportError:
        raise UserError(Problem(f'spaCy has no language "{language}"', "words")) from None

    def split(chunks: list[str]) -> list[list[str]]:
        found: list[list[str]] = [[]]
        # spaCy fails on a text that is the name of its attribute.
        text = " ".join(chunk.replace("IS_ALPHA", "") or "-" for chunk in chunks)
        with tokenizer.vocab.memory_zone():
            for token in tokenizer(text):
                found[-1].append(token.text)
                if token.whitespace_:
                    found.append([])
        return found

    return split


def splitter(name: str) -> Split:
    """The split function for a recipe's `words`: "simple", or "spacy/en" for the rules of a language."""
    kind, _, language = name.partition("/")
    if kind == "simple" and not language:
        return simple_words
    if kind == "spacy" and language:
        return spacy_words(language)
    raise UserError(
        Problem(f'"{name}" is not known: "simple", or "spacy/en" with spaCy\'s name of a language', "words")
    )


class Vocabulary:
    """All words seen, each with an id and the properties that filters need."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._clear()

    def _clear(self) -> None:
        self.words: list[str] = []
        self._bytes: list[bytes] = []
        self._number: dict[str, int] = {}
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._simplified: dict[str, tuple[int, ...]] = {}
        self._sentences: dict[str, tuple[int, int, int, int]] = {}
        self._of_chunk: dict[str, int] = {}
        self._lengths = np.zeros(1024, np.int64)
        self._hash = np.zeros(1024, np.uint64)
        self._letters = np.zeros(1024, np.uint64)
        self._flags = np.zeros((2, 1024), bool)

    def make_room(self) -> None:
        """Called between documents: forget everything when the tables have grown large."""
        if (
            len(self.words) > MOST_WORDS
            or len(self._chunks) + len(self._simplified) + len(self._of_chunk) > 2 * MOST_WORDS
        ):
            self._clear()

    def _learn(self, chunks: list[str]) -> None:
        """Split the chunks that were not seen before, all at once."""
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._chunks]
        if new:
            for chunk, words in zip(new, self._split(new), strict=True):
                self._chunks[chunk] = tuple(map(self.number, words))

    def _learn_simplified(self, chunks: list[str]) -> None:
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._simplified]
        if new:
            plain = [chunk if chunk.isascii() else _without_accents(chunk) for chunk in new]
            parts = [chunk.split() for chunk in plain]
            self._learn(list(chain.from_iterable(parts)))
            for chunk, part in zip(new, parts, strict=True):
                self._simplified[chunk] = tuple(chain.from_iterable(map(self._chunks.__getitem__, part)))

    def number(self, word: str) -> int:
        """The id of a word; a new one if the word was not seen before."""
        found = self._number.get(word)
        if found is not None:
            return found
        number = self._number[word] = len(self.words)
        self.words.append(word)
        if number >= len(self._lengths):
            for name in ("_lengths", "_hash", "_letters"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self._flags = np.concatenate([self._flags, np.zeros_like(self._flags)], axis=1)
        data = word.encode("utf-8", "surrogatepass")
        self._bytes.append(data)
        self._lengths[number] = len(word)
        self._hash[number] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        letters, power = 0, 1
        for letter in word:
            letters, power = letters + ord(letter) * power, power * int(BASE) % 2**64
        self._letters[number] = letters % 2**64
        self._flags[0, number] = not SYMBOLS.issuperset(word)
        self._flags[1, number] = any(map(str.isalpha, word))
        return number

    def ids(self, text: str) -> Ids:
        """The ids of the words of a text."""
        chunks = text.split()
        self._learn(chunks)
        return np.fromiter(chain.from_iterable(map(self._chunks.__getitem__, chunks)), np.int32)

    def simplified(self, text: str) -> list[bytes]:
        """The words that fuzzy deduplication compares, in UTF-8: without case, punctuation and accents, every number as 0."""
        return list(map(self._bytes.__getitem__, self._simplified_ids(text)))

    def _simplified_ids(self, text: str) -> Iterator[int]:
        chunks = _NUMBER.sub("0", text.lower()).translate(_TO_BLANKS).split()
        self._learn_simplified(chunks)
        return chain.from_iterable(map(self._simplified.__getitem__, chunks))

    def simplified_hashes(self, text: str) -> Hashes:
        """Hashes of the simplified words of a text."""
        return self.hashes(np.fromiter(self._simplified_ids(text), np.int32))

    def chunk_hashes(self, text: str) -> Hashes:
        """A hash of each chunk between blanks, the same in every process."""
        chunks = text.split()
        for chunk in chunks:
            if chunk not in self._of_chunk:
                data = chunk.encode("utf-8", "surrogatepass")
                self._of_chunk[chunk] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return np.fromiter(map(self._of_chunk.__getitem__, chunks), np.uint64, len(chunks))

    def sentences(self, line: str) -> int:
        """The number of sentences in a line, by spaCy's `sentencizer`: one begins with the first word after an end of sentence."""
        count, after = 1, 0
        chunks = line.split()
        self._learn(chunks)
        for chunk in chunks:
            found = self._sentences.get(chunk)
            if found is None:
                found = self._sentences[chunk] = self._sentence_steps(chunk)
            count += found[after]
            after = found[2 + after]
        return count

    def _sentence_steps(self, chunk: str) -> tuple[int, int, int, int]:
        """A chunk's effect on the count: the sentences it begins without and with a sentence end before it, then, for the same two
        cases, whether an end was seen after it."""
        counts, states = [], []
        for after in (False, True):
            count = 0
            for number in self._chunks[chunk]:
                word = self.words[number]
                ends = word in SENTENCE_ENDS
                if after and not ends and not _is_punctuation(word):
                    count, after = count + 1, False
                elif ends:
                    after = True
            counts.append(count)
            states.append(int(after))
        return counts[0], counts[1], states[0], states[1]

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        """The number of characters of each word."""
        return self._lengths[ids]

    def hashes(self, ids: Ids) -> Hashes:
        """A hash of each word, the same in every process."""
        return self._hash[ids]

    def letters(self, ids: Ids) -> Hashes:
        """The polynomial hash of each word's letters, from which the hash of a run of words is computed."""
        return self._letters[ids]

    def real(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether a word has a character other than punctuation."""
        return self._flags[0][ids]

    def alphabetic(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether a word has a letter."""
        return self._flags[1][ids]


# The sentence ends of spaCy's `sentencizer`; FineWeb's line filter has a different list, `TERMINAL`.
SENTENCE_ENDS = frozenset(
    "!.?։؟۔܀܁܂߹।॥၊။።፧፨᙮᜵᜶᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡。"
    "𐩖𐩗𑁇𑁈𑂾𑂿𑃀𑃁𑅁𑅂𑅃𑇅𑇆𑇍𑇞𑇟𑈸𑈹𑈻𑈼𑊩𑑋𑑌𑗂𑗃𑗉𑗊𑗋𑗌𑗍𑗎𑗏𑗐𑗑𑗒𑗓𑗔𑗕𑗖𑗗𑙁𑙂𑜼𑜽𑜾𑩂𑩃𑪛𑪜𑱁𑱂𖩮𖩯𖫵𖬷𖬸𖭄𛲟𝪈"
)


def _without_accents(text: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFD", text) if unicodedata.category(letter) != "Mn")


def _is_punctuation(word: str) -> bool:
    return all(unicodedata.category(letter).startswith("P") for letter in word)


def runs(words: Hashes, n: int) -> Hashes:
    """A hash of each run of n words, from the hashes of the words."""
    total = np.zeros(max(0, len(words) - n + 1), np.uint64)
    for place in range(n):
        # Odd multipliers make the hash depend on word order; the shift mixes high bits into low ones.
        part = words[place : len(total) + place] * (BASE + np.uint64(2 * place))
        total = (total ^ (total >> np.uint64(29))) * BASE + part
    return total


class Document:
    """One document on its way through the steps. A step may change `text`; the cached words are then computed again."""

    def __init__(self, text: str, vocabulary: Vocabulary, meta: dict[str, Any] | None = None) -> None:
        self._text = text
        self.vocabulary = vocabulary
        self.meta = meta or {}

    @property
    def text(self) -> str:
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        if text != self._text:
            self._text = text
            for name in ("ids", "lengths", "lines"):
                self.__dict__.pop(name, None)

    @cached_property
    def ids(self) -> Ids:
        """The id of each word."""
        return self.vocabulary.ids(self._text)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of characters of each word."""
        return self.vocabulary.lengths(self.ids)

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text; a line end at its end adds no empty line."""
        return self._text.splitlines()

    def words(self) -> Iterator[str]:
        """The words as strings."""
        return map(self.vocabulary.words.__getitem__, self.ids)
