"""Published filter rules, each a function of one document that cites its source.

A rule returns the reason for removing a document, or "" to keep it. Thresholds are arguments, which a recipe may set; their
defaults are those of the publication. Repeated runs of words are compared by hashes that are computed for a whole document at once.
Only where an upper bound of the repetitions exceeds the limit are they counted exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from shardwise.data.prepare.words import BASE, INVERSE, TERMINAL, Document, Hashes, runs

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
TOP = ((2, 0.2), (3, 0.18), (4, 0.16))
DUPLICATE = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
ENDS = (".", "?", "!", '"', "'")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


def gopher_quality(
    document: Document,
    *,
    fewest_words: int = 50,
    most_words: int = 100_000,
    shortest_mean: float = 3,
    longest_mean: float = 10,
    symbols: float = 0.1,
    bullets: float = 0.9,
    ellipses: float = 0.3,
    alphabetic: float = 0.8,
    stop_words: int = 2,
    stop_list: Sequence[str] = STOP_WORDS,
) -> str:
    """Keep documents that look like natural language (Rae et al. 2021, "Gopher", section A1.1). Words of punctuation alone count as
    symbols, not as words, as in FineWeb."""
    words = document.ids
    real = document.vocabulary.real(words)
    count = int(real.sum())
    if count < fewest_words:
        return "too few words"
    if count > most_words:
        return "too many words"
    if count:
        mean = document.lengths[real].mean()
        if mean < shortest_mean:
            return "words too short"
        if mean > longest_mean:
            return "words too long"
    text, total = document.text, max(len(words), 1)
    if text.count("#") / total > symbols:
        return "too many hash signs"
    if (text.count("...") + text.count("…")) / total > symbols:
        return "too many ellipses"
    lines = document.lines or [""]
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines) > bullets:
        return "too many bullet points"
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines) > ellipses:
        return "too many lines end with an ellipsis"
    if document.vocabulary.alphabetic(words).sum() / total < alphabetic:
        return "too few words with letters"
    if stop_words:
        known = document.vocabulary
        if sum(bool((words == known.number(word)).any()) for word in set(stop_list)) < stop_words:
            return "too few stop words"
    return ""


def c4_quality(
    document: Document,
    *,
    citations: bool = True,
    terminal: bool = True,
    fewest_sentences: int = 5,
    fewest_words: int = 3,
    longest_word: int = 1000,
    lorem_ipsum: bool = True,
    javascript: bool = True,
    braces: bool = True,
    policy: bool = True,
) -> str:
    """Keep lines that are sentences, and pages that have enough of them (Raffel et al. 2020, "C4", section 2.2), with the additions
    of its published code: citations are cut out, and lines about cookies or with a very long word are removed. Changes the text to
    the kept lines. -1 switches off a limit, false a rule."""
    sentences = 0
    kept = []
    for line in document.lines:
        line = line.strip()
        words = line.split()
        if longest_word != -1 and len(line) > longest_word and max(map(len, words)) > longest_word:
            continue
        if citations and "[" in line:
            line = _CITATION.sub("", line)
        if terminal and (not line.endswith(ENDS) or line.endswith("...")):
            continue
        if len(words) < fewest_words:
            continue
        lower = line.lower()
        if lorem_ipsum and "lorem ipsum" in lower:
            return "lorem ipsum"
        if javascript and "javascript" in lower:
            continue
        if braces and "{" in line:
            return "a curly bracket"
        if policy and any(phrase in lower for phrase in POLICY):
            continue
        if fewest_sentences != -1:
            sentences += document.vocabulary.sentences(line)
        kept.append(line)
    if sentences < fewest_sentences:
        return "too few sentences"
    document.text = "\n".join(kept).strip()
    return ""


def c4_paragraphs(document: Document, *, fewest: int = 3, shortest: int = 200) -> str:
    """mC4 (Xue et al. 2021, section 3.1): at least three lines of 200 characters or more."""
    lengths = sorted(map(len, document.text.split("\n")), reverse=True)
    if len(lengths) < fewest or (fewest and lengths[fewest - 1] < shortest):
        return "too few long lines"
    return ""


def fineweb_quality(
    document: Document,
    *,
    punctuated: float = 0.12,
    short: float = 0.67,
    short_length: int = 30,
    repeated: float = 0.01,
    new_lines: float = 0.3,
) -> str:
    """FineWeb's own filters (Penedo et al. 2024, section 3.6): limits on the share of lines that end with
    punctuation, the share of short lines, the share of characters in repeated lines, and the ratio of line ends to words."""
    lines = [line for line in document.text.split("\n") if line and not line.isspace()]
    if not lines:
        return "empty"
    if sum(line[-1] in TERMINAL for line in lines) / len(lines) < punctuated:
        return "too few lines end with punctuation"
    if sum(len(line) <= short_length for line in lines) / len(lines) > short:
        return "too many short lines"
    ends = document.text.count("\n")
    if repetitions(lines)[1] / (len(document.text) - ends) > repeated:
        return "characters in repeated lines"
    if ends / max(len(document.ids), 1) > new_lines:
        return "too many line ends for its words"
    return ""


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
    """How much of a document repeats: lines, paragraphs, and runs of words (Rae et al. 2021, "Gopher", table A1). A share is of all
    lines or paragraphs, or of all characters."""
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
