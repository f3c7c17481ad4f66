"""Keeps documents that look like natural language (Rae et al. 2021, "Gopher", section A1.1)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.data.prepare.words import Document

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


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
    """Section A1.1 of Rae et al. 2021. Words of punctuation alone count as symbols, not as words, as in FineWeb."""
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
