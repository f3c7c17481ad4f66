"""How much of a document repeats: lines, paragraphs, and runs of words (Rae et al. 2021, "Gopher", table A1).

Runs of words are compared by hashes that are computed for a whole document at once. Only where an upper bound of the repetitions
exceeds the limit are they counted exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from shardwise.data.prepare.words import BASE, INVERSE, Document, Hashes, runs

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
TOP = ((2, 0.2), (3, 0.18), (4, 0.16))
DUPLICATE = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))


def gopher_repetition(
    document: Document,
    *,
    lines: float = 0.3,
    paragraphs: float = 0.3,
    line_characters: float = 0.2,
    paragraph_characters: float = 0.2,
    top: Sequence[Sequence[float]] = TOP,
    duplicate: Sequence[Sequence[float]] = DUPLICATE,
) -> str:
    """Table A1 of Rae et al. 2021. A share is of all lines or paragraphs, or of all characters."""
    text = document.text
    if not text:
        return "empty"
    parts = _PARAGRAPHS.split(text.strip())
    repeated, characters = repetitions(parts)
    if repeated / len(parts) > paragraphs:
        return "repeated paragraphs"
    if characters / len(text) > paragraph_characters:
        return "characters in repeated paragraphs"
    parts = _LINES.split(text)
    repeated, characters = repetitions(parts)
    if repeated / len(parts) > lines:
        return "repeated lines"
    if characters / len(text) > line_characters:
        return "characters in repeated lines"
    for n, share in top:
        if top_characters(document, int(n)) / len(text) > share:
            return f"most frequent {int(n)}-gram"
    spelled = _spelling(document)
    for n, share in duplicate:
        if _more_than(spelled, int(n), share * len(text), share, len(text)):
            return f"repeated {int(n)}-grams"
    return ""


def repetitions(parts: Iterable[str]) -> tuple[int, int]:
    """The number of parts that repeat an earlier one, and their characters."""
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        else:
            seen.add(part)
    return count, characters


def top_characters(document: Document, n: int) -> int:
    """Characters in all occurrences of the most frequent run of n words, blanks between them counted; the first run if several are
    equally frequent."""
    ids = document.ids
    if len(ids) < n:
        return 0
    found = runs(document.vocabulary.hashes(ids), n)
    order = np.argsort(found, kind="stable")
    ordered = found[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(found)))
    most = counts.max()
    first = int(order[starts[counts == most]].min())
    return int(document.lengths[first : first + n].sum() + n - 1) * int(most)


_Spelled = tuple[Hashes, Hashes, np.ndarray]


def _spelling(document: Document) -> _Spelled:
    """For the words written without blanks: the polynomial hash of the letters before each word, the inverse powers that shift a
    run to the start, and where words start. So two runs compare equal when their letters do, however they are divided into
    words."""
    ends = np.concatenate([[0], np.cumsum(document.lengths)])
    powers, inverses = _powers(int(ends[-1]) + 1)
    terms = document.vocabulary.letters(document.ids) * powers[ends[:-1]]
    prefix = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    return prefix, inverses, ends


_tables: list[Hashes] = [np.ones(1, np.uint64), np.ones(1, np.uint64)]


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Powers of the base and of its inverse; cached, since every document needs the same."""
    if len(_tables[0]) < count:
        size = max(2**16, 2 * count)
        with np.errstate(over="ignore"):
            for number, base in enumerate((BASE, INVERSE)):
                steps = np.full(size, base)
                steps[0] = 1
                _tables[number] = np.multiply.accumulate(steps, dtype=np.uint64)
    return _tables[0], _tables[1]


def _more_than(spelled: _Spelled, n: int, limit: float, share: float, length: int) -> bool:
    """Whether repeated runs of n words hold more characters than a share of the text. Runs are taken from left to right; after a
    repeated run, the next one begins at its end."""
    prefix, inverses, ends = spelled
    if len(ends) <= n:
        return False
    sizes = ends[n:] - ends[:-n]
    found = (prefix[n:] - prefix[:-n]) * inverses[ends[:-n]]
    order = np.argsort(found, kind="stable")
    again = np.zeros(len(found), bool)
    again[order[1:]] = found[order[1:]] == found[order[:-1]]
    if sizes[again].sum() <= limit:
        return False  # even counting overlapping runs twice, too few
    seen: set[int] = set()
    values, at, characters = found.tolist(), 0, 0
    while at < len(values):
        if values[at] in seen:
            characters += int(sizes[at])
            at += n
        else:
            seen.add(values[at])
            at += 1
    return characters / length > share
